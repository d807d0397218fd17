"""What the user has done once files are there: hooks in Python, and `finish.command`.

Hooks and commands have a thread each, so neither holds up training, an export, or the other. Both threads
are started when a capture opens: at exit Python 3.12 starts no more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.files.layout import sidecar_of
from stepscope.files.manifest import NOT_CLOSED, NOT_EXPORTED, NOT_RUN, Expectation
from stepscope.files.parts import read_parts
from stepscope.files.sidecar import Sidecar
from stepscope.recording import guard
from stepscope.recording.command import Command
from stepscope.recording.ledger import Ledger
from stepscope.recording.spans import describe

if TYPE_CHECKING:
    from stepscope.recording.result import CaptureResult
    from stepscope.recording.session import Session

COMMAND = "finish command"
"""Its name in the manifest."""
POLL_S = 0.5
"""Between two looks at the other processes' parts of the manifest."""

artifact_hooks: list[Callable[[Path, Sidecar], object]] = []
capture_hooks: list[Callable[[CaptureResult], object]] = []
"""Both lists have one writer: `stepscope.recording.hooks`."""
_failed: set[object] = set()
"""Hooks whose failure was logged. One writer: `_Hook`."""


class _Hook:
    """One call of one hook."""

    def __init__(
        self, kind: str, hook: Callable[..., object], call: Callable[[], object], ledger: Ledger
    ) -> None:
        self._name = f"{kind} hook {getattr(hook, '__qualname__', repr(hook))}"
        self._hook = hook
        self._call = call
        self._ledger = ledger

    def __call__(self) -> None:
        try:
            self._call()
        except BaseException as error:  # SystemExit too: the thread is ours
            self.give_up(describe(error))

    def give_up(self, reason: str) -> None:
        self._ledger.fail(self._name, reason)
        self._ledger.write()
        if self._hook not in _failed:
            _failed.add(self._hook)
            guard.warn("stepscope: the %s failed (logged once): %s", self._name, reason)


class _Finishing:
    """The command of one capture."""

    def __init__(self, result: CaptureResult, session: Session) -> None:
        self._result = result
        self._session = session
        self._over = threading.Event()
        self._files_until = time.monotonic() + session.config.budget.export_seconds
        layout, process = session.layout, session.process
        self._command = Command(
            session.config.finish.command or "",
            environ=_environ(session),
            log=layout.finish_log_of(process, session.run_id, session.number),
            timeout_s=session.config.finish.timeout_s,
        )

    @property
    def step(self) -> int:
        return self._session.step

    @property
    def longest_s(self) -> float:
        return self._session.config.finish.timeout_s

    def __call__(self) -> None:
        try:
            self._wait_for_files()
            reason = self._command.run()
        except Exception as error:
            reason = describe(error)
        ledger = self._session.ledger
        ledger.expect(Expectation(name=COMMAND, state="failed" if reason else "ok", reason=reason))
        ledger.write()
        if reason:
            guard.warn("stepscope: step %d: %s: failed: %s", self._session.step, COMMAND, reason)
        try:
            self._result.fold()
        except OSError as error:
            guard.note("writing the manifest", error)

    def hurry(self, seconds: float) -> None:
        """Waits for other processes' files no longer than this."""
        self._files_until = min(self._files_until, time.monotonic() + seconds)

    def give_up(self, reason: str) -> None:
        self._command.kill(reason)
        self._over.set()

    def _wait_for_files(self) -> None:
        """Of the capture's other processes; read off the disk, because a call would hold up a busy worker."""
        if self._session.config.export.when == "deferred":
            self._result.drain_workers(self._files_until - time.monotonic())
        while time.monotonic() < self._files_until and self._unfinished() and not self._over.wait(POLL_S):
            pass

    def _unfinished(self) -> bool:
        mine = self._session.ledger.part
        lost = {absent.process for absent in mine.absent}
        return any(
            item.reason in (NOT_EXPORTED, NOT_CLOSED)
            for part in read_parts(self._session.layout)[0]
            if part.run_id == mine.run_id and part.process != mine.process and part.process.key not in lost
            for item in part.expected
        )


class _Line:
    """Work that is done in order on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Hook | _Finishing] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # of an RLock: a SIGTERM handler may drain in the middle of put

    def start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the interpreter is exiting
        self._thread = thread

    def put(self, job: _Hook | _Finishing) -> None:
        self.start()
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> list[_Hook | _Finishing]:
        """Waits until all is done.

        Returns:
            What is unfinished after `timeout_s`, the job under way first.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs or self._thread is None, timeout_s)
            return list(self._jobs)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs)
                    job = self._jobs[0]
                try:
                    job()
                finally:
                    with self._changed:
                        self._jobs.popleft()
                        self._changed.notify_all()
        finally:
            self._thread = None


_hooks, _commands = _Line("stepscope-hooks"), _Line("stepscope-finish")
"""One writer: this module."""


def promise(session: Session, *, alone: bool) -> None:
    """A capture opens: says in its manifest what is to be run, and has the threads ready.

    Args:
        alone: The capture has neither workers nor engines: other ranks may have opened one of their own.
    """
    if artifact_hooks or capture_hooks:
        _hooks.start()
    if not session.config.finish.command:
        return
    ranks, rank = session.config.finish.ranks, session.process.rank
    chosen = ranks == "all" or (rank == 0 if ranks == "first" else rank in ranks)
    if alone and rank is not None and not chosen:
        spelled = ranks if isinstance(ranks, str) else list(ranks)
        session.ledger.skip(COMMAND, f"rank {rank} is not in finish.ranks: {spelled}")
        return
    session.ledger.expect(Expectation(name=COMMAND, state="missing", reason=NOT_RUN))
    _commands.start()


def withdraw(session: Session, reason: str) -> None:
    """The capture is discarded: nothing is run after it."""
    if session.ledger.state(COMMAND) == "missing":
        session.ledger.expect(Expectation(name=COMMAND, state="skipped", reason=reason))


def wanted(session: Session) -> bool:
    """Whether anything is to be done after the capture."""
    return bool(capture_hooks) or session.ledger.state(COMMAND) == "missing"


def capture_done(result: CaptureResult, session: Session) -> None:
    """The capture is closed and its files of this process are written, or given up."""
    for hook in tuple(capture_hooks):
        _hooks.put(_Hook("on_capture", hook, partial(hook, result), session.ledger))
    if session.ledger.state(COMMAND) == "missing":
        _commands.put(_Finishing(result, session))


def busy_steps() -> set[int]:
    """Steps whose command has not run or is under way."""
    return {job.step for job in _unfinished_commands()}


def artifact_done(path: Path, sidecar: Sidecar | None, ledger: Ledger) -> None:
    """A file is in place. `sidecar` is None where an engine wrote it: it is read from beside the file."""
    for hook in tuple(artifact_hooks):
        _hooks.put(_Hook("on_artifact", hook, partial(_tell, hook, path, sidecar), ledger))


def _tell(hook: Callable[[Path, Sidecar], object], path: Path, sidecar: Sidecar | None) -> None:
    hook(path, sidecar or msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar))


def end(reason: str, deadline_s: float, *, patient: bool) -> None:
    """The process ends. What is still under way then is killed (commands) or left (hooks), and recorded.

    Args:
        patient: Commands get their own time; else `deadline_s` is for all.
    """
    until = time.monotonic() + deadline_s
    for call in _hooks.drain(deadline_s):
        call.give_up(f"unfinished at the end: {reason}")
    jobs = _unfinished_commands()
    if not jobs:
        return
    left_s = max(0.0, until - time.monotonic())
    try:
        if patient:
            for job in jobs:
                job.hurry(left_s)
            left_s += sum(job.longest_s for job in jobs)
            guard.warn("stepscope: waiting for finish.command, at most %d s", left_s)
        _commands.drain(left_s)
    finally:  # an impatient Ctrl-C must not leave the command behind
        for late in _unfinished_commands():
            late.give_up(f"unfinished at the end: {reason}")
        _commands.drain(1)  # for its record


def _unfinished_commands() -> list[_Finishing]:
    return [job for job in _commands.drain(0) if isinstance(job, _Finishing)]


def _environ(session: Session) -> dict[str, str]:
    process = session.process
    known = {
        "STEPSCOPE_SAVE_PATH": os.path.abspath(session.config.save_path),
        "STEPSCOPE_STEP": str(session.step),
        "STEPSCOPE_STEP_PATH": os.path.abspath(session.layout.root),
        "STEPSCOPE_RUN_ID": session.run_id,
        "STEPSCOPE_ROLE": process.role,
        "STEPSCOPE_PID": str(process.pid),
    }
    others = {name: value for name, value in os.environ.items() if name != "STEPSCOPE_RANK"}
    return others | known | ({} if process.rank is None else {"STEPSCOPE_RANK": str(process.rank)})


def _in_child() -> None:
    # The parent's work is the parent's, and its threads are not here.
    global _hooks, _commands
    _hooks, _commands = _Line("stepscope-hooks"), _Line("stepscope-finish")


os.register_at_fork(after_in_child=_in_child)
