"""Removal of the oldest captured steps (`budget.keep_steps`), and of unfinished files of killed processes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope._recording.after import pipeline
from stepscope._recording.after.programs import COMMAND
from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files.layout import RunLayout, StepLayout, sidecar_of
from stepscope.files.manifest.parts import fold, part_files, read_parts, write_manifest
from stepscope.files.manifest.records import ProcessPart
from stepscope.files.storage.atomic import private
from stepscope.files.storage.temporary import remove_abandoned, temporary

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

_kept: set[str] = set()
"""Runs in which an old step had to stay. One writer: `_tell_kept`."""
_tidied: dict[str, StepLayout] = {}
"""{output folder: the step captured last in it}. One writer: `_tidy`."""


def clean_up(session: Session) -> None:
    """Remove old steps now, and unfinished files once this process has written its own."""
    keep = session.config.budget.keep_steps
    if keep is not None:
        _retain(RunLayout(session.config.save_path), session.run_id, keep)
    # A walk through the run's folder: neither the opening nor the step waits for it.
    pipeline.once_written(session, partial(_tidy, session.config.save_path, session.layout))


def _retain(run: RunLayout, run_id: str, keep: int) -> None:
    """Remove the oldest captured steps of this run, so that `keep` are left. Files of other runs are not
    touched, even if they are of the same step.

    A step stays while work after its capture is under way, and if its `finish.command` failed, which may
    have been the step's copy to another place.
    """
    times = {number: at for number, step in run.steps().items() if (at := _opened(step, run_id)) is not None}
    oldest = sorted(times, key=lambda number: times[number])[: max(0, len(times) - keep)]
    busy = pipeline.busy_steps(run)
    idle = [number for number in oldest if number not in busy]
    kept = [number for number in idle if not _is_finished(run.step(number), run_id)]
    _tell_kept(run, kept)
    for number in idle:
        if number not in kept:
            _remove(run, number, run_id, keep)


def _is_finished(step: StepLayout, run_id: str) -> bool:
    """Return whether no rank of the run has a `finish.command` for the step that failed or has not ended."""
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
                if path.is_dir():  # a recording of the Ascend profiler
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
    """Rename a folder before removing it, so that a thread that still writes under the old name cannot keep
    half of it.
    """
    leaving = temporary(folder)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def _files_of(step: StepLayout, run_id: str, parts: Mapping[Path, ProcessPart]) -> Iterator[Path]:
    """Yield a run's files of a step. The parts of its manifest come last, because they list the other
    files.
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
    """Return when this run opened its capture of the step, or None if some of its parts cannot be read."""
    parts, unreadable = read_parts(step)
    if unreadable:
        return None
    owners = (part.opened.wall_ns for part in parts if part.owner and part.run_id == run_id)
    return min(owners, default=None)


def _tidy(save_path: str, step: StepLayout) -> None:
    """Remove unfinished files of killed processes: once in the whole folder, then in the last step."""
    last = _tidied.get(save_path)
    remove_abandoned(Path(save_path) if last is None else last.root)
    _tidied[save_path] = step
