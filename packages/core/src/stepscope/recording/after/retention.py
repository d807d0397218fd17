"""Removal of the oldest captured steps of a run (`budget.keep_steps`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.storage.atomic import private
from stepscope.recording.process import failures

_kept: set[str] = set()
"""Runs in which an old step had to stay. One writer: `retain`."""


def retain(
    run: RunLayout,
    run_id: str,
    keep: int,
    *,
    busy: Collection[int] = (),
    may_go: Callable[[StepLayout], bool] = lambda _: True,
) -> list[int]:
    """Remove the oldest captured steps of this run, so that `keep` are left. Other runs' are not touched.

    Args:
        busy: Steps that are left for the next time, because work after their capture is under way.
        may_go: False for a step that would be lost: its copy in the mirror is not whole.

    Returns:
        The steps removed, which also stand in `removed.txt`.
    """
    times = {number: at for number, step in run.steps().items() if (at := _opened(step, run_id)) is not None}
    oldest = sorted(times, key=lambda number: times[number])[: max(0, len(times) - keep)]
    idle = [number for number in oldest if number not in busy]
    kept = [number for number in idle if not may_go(run.step(number))]
    if kept and str(run.root) not in _kept:
        _kept.add(str(run.root))
        failures.warn(
            "stepscope: budget.keep_steps leaves step %s (said once): finish.mirror has no whole copy of it. "
            "Its manifest says why; `stepscope mirror %s` tries again",
            ", ".join(map(str, kept)),
            run.root,
        )
    return [number for number in idle if number not in kept and _remove(run, number, keep)]


def _remove(run: RunLayout, number: int, keep: int) -> bool:
    try:
        shutil.rmtree(run.step(number).root)
        with open(run.removed, "a", opener=private) as file:
            file.write(f"step {number}: removed at {time.time_ns()} (unix ns); budget.keep_steps is {keep}\n")
    except OSError as error:
        failures.note("removing an old step", error)
        return False
    return True


def _opened(step: StepLayout, run_id: str) -> int | None:
    """Return when this run opened its capture of the step; None if it holds recordings of another run."""
    parts, unreadable = read_parts(step)
    if unreadable or any(part.run_id != run_id for part in parts):
        return None
    owners: Iterator[int] = (part.opened.wall_ns for part in parts if part.owner)
    return min(owners, default=None)
