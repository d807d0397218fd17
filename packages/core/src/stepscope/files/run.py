"""The record of a run, `run.json`, and the captured steps that belong to the run.

The owner of the run's first capture writes the record. A resumed run has another id, and usually the same
folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from stepscope.files.clock import Int
from stepscope.files.layout import StepLayout, safe
from stepscope.files.manifest_parts import part_files
from stepscope.files.spans import Header
from stepscope.files.storage import read_first


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    format: Int = 1
    run_id: str
    started_ns: Int
    """Start of the run in unix ns."""
    host: str
    pid: Int
    command: tuple[str, ...]
    config: dict[str, object]
    """The resolved configuration, as `ProfileConfig.to_mapping` returns it."""
    versions: dict[str, str]


class RunSteps(NamedTuple):
    """The steps of one run in a folder that may have several runs."""

    run_id: str | None
    """Id of the run, or None if no file states an id."""
    steps: dict[int, StepLayout]
    """The steps of the run, and the steps of unknown runs."""
    others: dict[str, list[int]]
    """{id of another run: its steps that this run did not capture}, the newest run first."""
    opened_ns: int
    """Unix time in ns at which the run opened its last capture, or 0 if unknown."""


def steps_of_run(steps: Mapping[int, StepLayout], run_id: str | None = None) -> RunSteps:
    """Return the steps of the run `run_id`, by default of the run that opened the latest capture."""
    held = {number: runs_of(layout) for number, layout in steps.items()}
    last = _last(pair for opened in held.values() for pair in opened.items())
    newest_first = sorted(last, key=lambda run: -last[run])
    chosen = next((run for run in newest_first if run_id in (None, run, safe(run))), run_id)
    own = {number: steps[number] for number, runs in held.items() if not runs or chosen in runs}
    others = {
        run: [number for number, runs in held.items() if run in runs and number not in own]
        for run in newest_first
    }
    return RunSteps(
        chosen, own, {run: left for run, left in others.items() if left}, last.get(chosen or "", 0)
    )


def runs_of(step: StepLayout) -> dict[str, int]:
    """Return {run id: unix ns at which the run last opened a capture of the step}. Empty if the folder may
    not be read.
    """
    try:
        parts, _ = part_files(step, as_written=True)
        spans = list(step.spans.glob("[!.]*.jsonl"))
    except OSError:
        return {}
    opened = [(part.run_id, part.opened.wall_ns) for part in parts.values()]
    named = {path.stem for path in parts}
    unnamed = (path for path in spans if path.stem not in named)
    headers = (read_first(path, Header) for path in unnamed)
    return _last([*opened, *((head.run_id, head.anchor.wall_ns) for head in headers if head is not None)])


def _last(opened: Iterable[tuple[str, int]]) -> dict[str, int]:
    last = dict[str, int]()
    for run, at_ns in opened:
        last[run] = max(at_ns, last.get(run, 0))
    return last
