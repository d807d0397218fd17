"""The end of a capture: its manifest, the log lines derived from the manifest, and the removal of old steps.

Old steps are removed as `budget.keep_steps` asks.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope._recording.capture import omissions, on_demand, result
from stepscope._recording.capture.asked import Asked
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.process import exports, failures, identity
from stepscope._recording.process.manifest_part import find_peers
from stepscope._recording.recorder import standing, steps
from stepscope._recording.session import activation, pipeline
from stepscope._recording.session.programs import COMMAND
from stepscope._recording.session.session import Session
from stepscope.errors import ours
from stepscope.files.layout import RunLayout, StepLayout, sidecar_of
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.manifest_parts import fold, part_files, read_parts, write_manifest
from stepscope.files.storage import create_once, private, remove_abandoned, temporary

if TYPE_CHECKING:
    from stepscope._recording.fanout.participants import Participants


_kept: set[str] = set()
"""Root folders of the runs for which this process has warned that a step is kept in spite of
`budget.keep_steps`. One writer: `_tell_kept`."""
_tidied: dict[str, StepLayout] = {}
"""{output folder: the step that was captured last}. One writer: `_tidy`."""


def clean_up(session: Session) -> None:
    """Remove old steps, and remove unfinished files once this process has written its files.

    The removals are queued for the exporter's thread, because they walk through folders.
    """
    keep = session.config.budget.keep_steps
    if keep is not None:
        retain = partial(_retain, RunLayout(session.config.save_path), session.run_id, keep)
        exports.exporter().then(retain, deferred=False)
    pipeline.once_written(session, partial(_tidy, session.config.save_path, session.layout))


def _retain(run: RunLayout, run_id: str, keep: int) -> None:
    """Remove the oldest captured steps of this run until `keep` steps are left. Files of other runs are not
    removed, even from the same step.

    A step is kept while it is captured again, and while work after its capture is running. A step is also
    kept if its `finish.command` has not succeeded, because the command may copy the step elsewhere.
    """
    times = {number: at for number, step in run.steps().items() if (at := _opened(step, run_id)) is not None}
    oldest = sorted(times, key=lambda number: times[number])[: max(0, len(times) - keep)]
    busy = {*pipeline.busy_steps(run), activation.claimed_step()}
    idle = [number for number in oldest if number not in busy]
    kept = [number for number in idle if not _is_finished(run.step(number), run_id)]
    _tell_kept(run, kept)
    for number in idle:
        if number not in kept:
            _remove(run, number, run_id, keep)


def _is_finished(step: StepLayout, run_id: str) -> bool:
    """Return True if each `finish.command` that the run started for the step has succeeded."""
    parts, _ = read_parts(step)
    commands = [
        item for part in parts if part.run_id == run_id for item in part.expected if item.name == COMMAND
    ]
    return all(item.state not in ("pending", "failed") for item in commands)


def _tell_kept(run: RunLayout, kept: Sequence[int]) -> None:
    if kept and str(run.root) not in _kept:
        _kept.add(str(run.root))
        failures.warn(
            "stepscope: budget.keep_steps leaves step %s (said once): its finish.command has not ended well. "
            "The step's manifest and its finish_*.log say why",
            ", ".join(map(str, kept)),
        )


def _remove(run: RunLayout, number: int, run_id: str, keep: int) -> None:
    step = run.step(number)
    parts, _ = part_files(step, as_written=True)
    others = [part for part in parts.values() if part.run_id != run_id]
    try:
        if not others:
            _remove_folder(step.root)
        else:
            for path in _files_of(step, run_id, parts):
                if path.is_dir():  # a folder that the Ascend profiler wrote
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            newest = max(others, key=lambda part: part.opened.wall_ns).run_id
            write_manifest(step, fold([part for part in others if part.run_id == newest]))
        with open(run.removed, "a", opener=private) as file:
            file.write(f"step {number}: removed at {time.time_ns()} (unix ns); budget.keep_steps is {keep}\n")
    except ours(OSError) as error:
        failures.note("removing an old step", error)


def _remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a thread that still writes into the old path cannot
    recreate it.
    """
    leaving = temporary(folder)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def _files_of(step: StepLayout, run_id: str, parts: Mapping[Path, ProcessPart]) -> Iterator[Path]:
    """Yield the files of a run in a step's folder. The manifest's parts come last, because they list the
    other files.
    """
    own = {path: part for path, part in parts.items() if part.run_id == run_id}
    for path, part in own.items():
        for made in (made for item in part.expected for made in item.artifacts):
            yield step.root / made.path
            yield sidecar_of(step.root / made.path)
        yield step.spans / f"{path.stem}.jsonl"
        yield step.counters / f"{path.stem}.jsonl"
        yield step.states / path.name
    yield from step.processes.glob(f"{step.logged(run_id).name}*")
    yield from (step.scalars(run_id), step.metrics(run_id), *own)


def _opened(step: StepLayout, run_id: str) -> int | None:
    """Return the unix ns at which the run opened its capture of the step, or None if unknown."""
    parts, unreadable = read_parts(step)
    if unreadable:
        return None
    owners = (part.opened.wall_ns for part in parts if part.owner and part.run_id == run_id)
    return min(owners, default=None)


def _tidy(save_path: str, step: StepLayout) -> None:
    """Remove unfinished files of killed processes. The first call looks in the whole output folder, a later
    call only in the step that was captured before.
    """
    last = _tidied.get(save_path)
    remove_abandoned(Path(save_path) if last is None else last.root)
    _tidied[save_path] = step


_is_torch_explained = False
"""True if this process has logged the explanation of the lines that torch prints. One writer:
`_about_torch`."""


def conclude(asked: Asked, session: Session, participants: Participants | None) -> Manifest:
    """Complete the manifest, log problems, answer the request if there was one, and queue the removal of old
    steps.
    """
    alone = participants is None and identity.place()[1] == 1
    manifest = _write(session, partial(_enter_omissions, asked, session, participants), alone=alone)
    if asked.on_request:
        is_apart = participants is not None and bool(participants.apart)
        no_profiler = None if is_apart else omissions.no_profiler(session.config, manifest.processes)
        tell_asker(asked, result.shortfall(manifest, no_profiler))
    clean_up(session)
    steps.captured(session)
    recorder, part = standing.standing(), session.manifest_part.record
    if recorder is not None and part.closed is not None:
        recorder.captured(session.step, part.opened, part.closed, part.error, session.log.top_ns)
    return manifest


def discard(asked: Asked, session: Session, reason: str) -> None:
    """Complete the manifest of a capture that is discarded."""
    pipeline.withdraw(session, reason)
    _write(session, lambda _: None, alone=False)
    tell_asker(asked, reason)
    clean_up(session)


def _write(session: Session, enter: Callable[[Sequence[ProcessPart]], None], *, alone: bool) -> Manifest:
    # `told` is set before the manifest is read, so that a trace that fails meanwhile is logged at least once,
    # perhaps twice.
    session.manifest_part.told = True
    manifest = session.manifest_part.write_last(session.layout, enter, alone=alone)
    for line in result.problems_to_tell(manifest, session.process):
        failures.warn("stepscope: step %d: %s", session.step, line)
    return manifest


def tell_asker(asked: Asked, reason: str | None) -> None:
    """Answer the request for the step.

    Args:
        reason: Reason why the capture is incomplete, or None if it is complete.
    """
    if asked.on_request:
        on_demand.tell_outcome(asked.step, reason)


def tell_summary(session: Session, files: CapturedFiles, manifest: Manifest) -> None:
    """Log one line about a captured step. If each rank opened its own capture, the last rank to close logs
    the line.
    """
    if result.is_open_elsewhere(manifest.processes, session.process):
        return
    has_peers = any(result.is_peer(part, session.process) for part in manifest.processes)
    logged = session.layout.logged(session.run_id, session.number)
    if has_peers and not create_once(logged, identity.IMPORTED_NS):
        return  # of two ranks that close at the same time, only one logs the line
    line = result.summary(manifest, session.layout.root, session.config.save_path, files.apart)
    failures.tell("stepscope: %s%s", line, _about_torch())


def _enter_omissions(
    asked: Asked, session: Session, participants: Participants | None, parts: Sequence[ProcessPart]
) -> None:
    """Enter into the manifest which roles and workers the capture probably lacks."""
    manifest_part = session.manifest_part
    omissions.tell_missed(parts)
    if participants is None and _lacks_a_rank(parts):
        is_last = not result.is_open_elsewhere(parts, session.process)
        run = RunLayout(session.config.save_path)
        manifest_part.add_peers(find_peers(run, session.process, session.run_id, all_hosts=is_last))
    if manifest_part.record.absent or manifest_part.state(omissions.WORKERS) is not None:
        return  # an absent worker may have the role
    if _knows_all(session, participants, parts):
        omissions.enter_unmatched(manifest_part, session.config, parts, engines=asked.engines is not None)


def _lacks_a_rank(parts: Sequence[ProcessPart]) -> bool:
    """Return whether a rank of this process' launcher has no part, or died before it closed its part."""
    _, size = identity.place()
    ranks = {part.process.key for part in parts if part.owner}
    return size > 1 and (len(ranks) < size or any(part.died for part in parts))


def _knows_all(session: Session, participants: Participants | None, parts: Sequence[ProcessPart]) -> bool:
    """Return whether this host has the parts of all participants.

    If each rank of a launcher opened its own capture, only the last rank to close finds all parts.
    """
    if participants is not None:
        return not participants.apart
    _, size = identity.place()
    if size == 1:
        return True
    ranks = {part.process.key for part in parts if part.owner}
    return len(ranks) == size and not result.is_open_elsewhere(parts, session.process)


def _about_torch() -> str:
    """Return an explanation of the lines that torch's profiler prints at its first start.

    Return empty text if the profiler has not started, or if the explanation was returned before.
    """
    global _is_torch_explained
    torch_window = sys.modules.get("stepscope.backends.torch.window")
    if _is_torch_explained or torch_window is None or not torch_window.kineto_has_started:
        return ""
    _is_torch_explained = True
    return ". The lines that torch's profiler prints at its first start are harmless"
