"""Work that begins once the files of a capture are written: hooks, and two separate programs
(`finish.command`, figures).

Hooks have one thread and programs have another, so that they do not delay training, exports or each other.
Both threads start when a capture opens, because Python 3.12 cannot start threads at exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope._recording.process import exports, failures, fork, shutdown
from stepscope._recording.process.failures import describe
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.process.work_queue import WorkQueue
from stepscope._recording.session.programs import COMMAND, SCALARS, Chores, ClosedCapture
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.manifest import Ending, Expectation, awaited
from stepscope.files.scalars import StepScalars
from stepscope.files.sidecar import Sidecar
from stepscope.files.storage import read_record

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

artifact_hooks: list[Callable[[Path, Sidecar], object]] = []
capture_hooks: list[Callable[[Any], object]] = []
report_hooks: list[Callable[[StepScalars], object]] = []
"""Hooks of `on_artifact`, `on_capture` and `on_report`. One writer of these lists:
`stepscope._recording.session.hooks`."""
_awaited: set[int] = set()
"""Closed steps whose files are being written. Writers: `hand_over`, `_capture_done`, `_forget`."""
_MOST_UNFOLDED = 16
"""Largest number of captures in `_unfolded`. Without a limit, a worker that died on another host would be
awaited for ever."""
_unfolded: dict[Path, Session] = {}
"""{step folder: session} of captures whose `manifest.json` has pending files. Writers: `fold_when_written`,
`_fold_again`, `_forget`."""
_failed: set[object] = set()
"""Hooks whose failure has been logged. One writer: `_Hook`."""


class _Hook:
    """One call of one hook."""

    def __init__(
        self, kind: str, hook: Callable[..., object], call: Callable[[], object], manifest_part: ManifestPart
    ) -> None:
        self._name = f"{kind} hook {getattr(hook, '__qualname__', repr(hook))}"
        self._hook = hook
        self._call = call
        self._manifest_part = manifest_part

    def __call__(self) -> None:
        try:
            self._call()
        except BaseException as error:  # SystemExit too, because this is a thread of stepscope
            self.give_up(describe(error))

    def give_up(self, reason: str) -> None:
        self._manifest_part.fail(self._name, reason, kind="after")
        self._manifest_part.write()
        if self._hook not in _failed:
            _failed.add(self._hook)
            failures.warn("stepscope: the %s failed (logged once): %s", self._name, reason)


def _new_queues() -> tuple[WorkQueue[_Hook], WorkQueue[Chores]]:
    return (
        WorkQueue("stepscope-hooks", _Hook.__call__),
        WorkQueue("stepscope-finish", Chores.__call__),
    )


_hooks, _commands = _new_queues()
"""The queues of hooks and of programs. One writer: this module."""


def promise(session: Session, *, alone: bool) -> None:
    """Enter the work after a capture into its manifest while the capture opens, and start the threads for the
    work.

    Args:
        alone: True if the capture has no workers and no engines, so that other ranks may have opened captures
            of the same step.
    """
    if artifact_hooks or capture_hooks or report_hooks:
        _hooks.start()
    finish = session.config.finish
    asked = {
        COMMAND: finish.command is not None,
        SCALARS: bool(finish.report_to or report_hooks),
    }
    wanted = [name for name, is_asked in asked.items() if is_asked]
    if not wanted:
        return
    ranks, rank = finish.ranks, session.process.rank
    chosen = ranks == "all" or (rank == 0 if ranks == "first" else rank in ranks)
    if alone and rank is not None and not chosen:
        spelled = ranks if isinstance(ranks, str) else list(ranks)
        for name in wanted:
            session.manifest_part.skip(name, f"rank {rank} is not in finish.ranks: {spelled}", kind="after")
        return
    _expect(session, wanted)


def _expect(session: Session, names: Sequence[str]) -> None:
    for name in names:
        session.manifest_part.expect(awaited(name, "after", "running"))
    _commands.start()


def _promised(session: Session) -> list[str]:
    return [name for name in (COMMAND, SCALARS) if session.manifest_part.state(name) == "pending"]


def withdraw(session: Session, reason: str) -> None:
    """Cancel the work after a discarded capture, with `reason` in the manifest."""
    for name in _promised(session):
        session.manifest_part.expect(Expectation(name=name, kind="after", state="skipped", reason=reason))


def hand_over(closed: ClosedCapture, result: object, session: Session) -> None:
    """Queue the work after a closed capture. The work begins once this process has written its files.
    `on_capture` hooks get `result`.
    """
    if not (capture_hooks or _promised(session) or closed.apart):
        return
    _awaited.add(session.step)
    once_written(session, partial(_capture_done, closed, result, session))


def once_written(session: Session, work: Callable[[], object]) -> None:
    """Call `work` once the files of this process are written or have failed."""
    exports.exporter().then(work, deferred=session.config.export.when == "deferred")


def fold_when_written(session: Session) -> None:
    """Write `manifest.json` on the exporter's thread once this process has written its files. Write it again
    later if files of other processes are still pending.

    Readers combine the parts of the manifest themselves, so the training does not wait for `manifest.json`.
    """
    _unfolded[session.layout.root] = session
    for root in tuple(_unfolded)[:-_MOST_UNFOLDED]:
        _unfolded.pop(root, None)  # with a default, as the exporting thread may remove the entry too
    exports.exporter().then(_fold_again, deferred=False)
    if session.config.export.when == "deferred":
        once_written(session, _fold_again)


def _fold_again() -> None:
    for root, session in tuple(_unfolded.items()):
        if not root.is_dir() or _is_final(session):
            _unfolded.pop(root, None)


def _is_final(session: Session) -> bool:
    """Write `manifest.json`, and return whether all processes of the capture have written their
    files.
    """
    part, layout = session.manifest_part, session.layout
    while True:
        manifest = part.fold(layout)
        items = [item for process in manifest.processes for item in process.expected]
        if not any(item.pending in ("closing", "exporting") for item in items):
            return True
        # Otherwise another rank has written its part meanwhile, so the manifest is written again.
        if part.manifest(layout) == manifest:
            return False


def _capture_done(closed: ClosedCapture, result: object, session: Session) -> None:
    for hook in tuple(capture_hooks):
        _hooks.put(_Hook("on_capture", hook, partial(hook, result), session.manifest_part))
    if _promised(session) or closed.apart:
        _start_chores(session, closed)
    _awaited.discard(session.step)  # removed last, once the work is queued


def _start_chores(session: Session, closed: ClosedCapture) -> None:
    def tell(scalars: StepScalars) -> None:
        for hook in tuple(report_hooks):
            _hooks.put(_Hook("on_report", hook, partial(hook, scalars), session.manifest_part))

    _commands.put(Chores(session, closed, tell))


def busy_steps(run: RunLayout) -> set[int]:
    """Return the steps with unwritten files or unfinished work after their capture."""
    files = exports.exporter().unwritten()
    written = {
        at for at, step in run.steps().items() if any(file.is_relative_to(step.root) for file in files)
    }
    return written | _awaited | {job.step for job in _commands.unfinished()}


def artifact_done(path: Path, sidecar: Sidecar | None, manifest_part: ManifestPart) -> None:
    """Call the `on_artifact` hooks for a complete file.

    Args:
        sidecar: The file's sidecar, or None to read it from disk, as for an engine's file.
    """
    for hook in tuple(artifact_hooks):
        _hooks.put(_Hook("on_artifact", hook, partial(_tell, hook, path, sidecar), manifest_part))


def _tell(hook: Callable[[Path, Sidecar], object], path: Path, sidecar: Sidecar | None) -> None:
    hook(path, sidecar or read_record(sidecar_of(path), Sidecar))


def _end_of_process(ending: Ending, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    unwritten = exports.exporter().drain(deadline_s)
    if unwritten:
        failures.warn("stepscope: lost at the end of the process: %s", ", ".join(unwritten))
    _fold_again()
    left_s = max(0.0, until - time.monotonic())
    end(ending.error, left_s, patient=deadline_s >= shutdown.EXIT_S)


def end(reason: str, deadline_s: float, *, patient: bool) -> None:
    """End the work at the end of the process: kill running programs, abandon hooks, and record both in the
    manifest.

    Args:
        patient: True if each program may use its own time limit; False if all share `deadline_s`.
    """
    until = time.monotonic() + deadline_s
    _leave_hooks(reason, deadline_s)
    jobs = _commands.unfinished()
    if not jobs:
        return
    left_s = max(0.0, until - time.monotonic())
    try:
        if patient:
            for job in jobs:
                job.hurry(left_s)
            left_s += sum(job.longest_s for job in jobs)
            failures.warn("stepscope: waiting for the work after captures (`finish`), at most %d s", left_s)
        _commands.drain(left_s)
    finally:  # after a second Ctrl-C too, no program may keep running
        for late in _commands.unfinished():
            late.give_up(f"unfinished at the end: {reason}")
        _commands.drain(1)  # wait until the outcome is in the manifest
    _leave_hooks(reason, 1)  # then run `on_report` hooks, because figures may have arrived


def _leave_hooks(reason: str, timeout_s: float) -> None:
    for call in _hooks.drain(timeout_s):
        call.give_up(f"unfinished at the end: {reason}")


def _forget() -> None:
    # A forked child does not have the threads, and the queued work belongs to the parent.
    global _hooks, _commands
    _awaited.clear()
    _unfolded.clear()
    _hooks, _commands = _new_queues()


shutdown.on_exit("files and what comes after them", _end_of_process, order=20)
fork.forgets("hooks and programs", _forget)
