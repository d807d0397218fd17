"""Removal of the oldest captured steps (`budget.keep_steps`), and of unfinished files of killed processes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.mirror import is_whole
from stepscope.files.storage.atomic import private
from stepscope.files.storage.temporary import remove_abandoned
from stepscope.recording.after import pipeline
from stepscope.recording.process import failures

if TYPE_CHECKING:
    from stepscope.recording.session.session import Session

_kept: set[str] = set()
"""Runs in which an old step had to stay. One writer: `_tell_kept`."""
_tidied: dict[str, StepLayout] = {}
"""Output folder -> the step captured last. One writer: `_tidy`."""


def clean_up(session: Session) -> None:
    """Remove old steps now, and unfinished files once this process has written its own."""
    keep, url = session.config.budget.keep_steps, session.config.finish.mirror
    # Of several ranks, the one that copies a step knows when it may be removed.
    if keep is not None and (url is None or pipeline.mirrors(session)):
        _retain(RunLayout(session.config.save_path), session.run_id, keep, url)
    # A walk through the run's folder: neither the opening nor the step waits for it.
    pipeline.once_written(session, partial(_tidy, session.config.save_path, session.layout))


def _retain(run: RunLayout, run_id: str, keep: int, url: str | None) -> None:
    """Remove the oldest captured steps of this run, so that `keep` are left. Other runs' are not touched.

    A step stays for the next time while work after its capture is under way, or if it would be lost: its copy
    in the mirror at `url` is not whole.
    """
    times = {number: at for number, step in run.steps().items() if (at := _opened(step, run_id)) is not None}
    oldest = sorted(times, key=lambda number: times[number])[: max(0, len(times) - keep)]
    busy = pipeline.busy_steps(run)
    idle = [number for number in oldest if number not in busy]
    kept = [number for number in idle if url is not None and not _is_mirrored(run.step(number), url)]
    _tell_kept(run, kept)
    for number in idle:
        if number not in kept:
            _remove(run, number, keep)


def _is_mirrored(step: StepLayout, url: str) -> bool:
    try:
        return is_whole(step, url)
    except OSError:
        return False


def _tell_kept(run: RunLayout, kept: Sequence[int]) -> None:
    if kept and str(run.root) not in _kept:
        _kept.add(str(run.root))
        failures.warn(
            "stepscope: budget.keep_steps leaves step %s (said once): finish.mirror has no whole copy of it. "
            "Its manifest says why; `stepscope mirror %s` tries again",
            ", ".join(map(str, kept)),
            run.root,
        )


def _remove(run: RunLayout, number: int, keep: int) -> None:
    try:
        shutil.rmtree(run.step(number).root)
        with open(run.removed, "a", opener=private) as file:
            file.write(f"step {number}: removed at {time.time_ns()} (unix ns); budget.keep_steps is {keep}\n")
    except OSError as error:
        failures.note("removing an old step", error)


def _opened(step: StepLayout, run_id: str) -> int | None:
    """Return when this run opened its capture of the step; None if it holds recordings of another run."""
    parts, unreadable = read_parts(step)
    if unreadable or any(part.run_id != run_id for part in parts):
        return None
    owners: Iterator[int] = (part.opened.wall_ns for part in parts if part.owner)
    return min(owners, default=None)


def _tidy(save_path: str, step: StepLayout) -> None:
    """Remove unfinished files of killed processes: once in the whole folder, then in the last step."""
    last = _tidied.get(save_path)
    remove_abandoned(Path(save_path) if last is None else last.root)
    _tidied[save_path] = step
