"""Steps of known content in a few lines, and what is read from them: reports, their text, and timelines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich.console import Console

from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.terminal import render
from stepscope_report.timeline import load_step, load_traces

MS = 1_000_000
T = TypeVar("T")
Row: TypeAlias = (
    "tuple[str, int, int | None] | tuple[str, int, int | None, str | dict[str, Any]]"
    "| tuple[str, int, int | None, str, dict[str, Any]]"
)
"""A span: "[process/]role stage[@step]", its start and end in ms (None: it never ended), the stage of the
span around it, and further fields of it."""


def some(value: T | None) -> T:
    """Return a value that must be there."""
    assert value is not None
    return value


def close(folder: StepFolder, at_ns: int) -> None:
    for process in folder.processes:
        process.close(at_ns)


def a_step(root: Path, lasts_ms: int, rows: Iterable[Row]) -> StepFolder:
    """Return a step of a trainer, which owns it, and of the processes of `rows`, such as "rollout:1"."""
    folder = StepFolder(root)
    processes = {"trainer": folder.process("trainer", owner=True)}
    spans: dict[str, tuple[FakeProcess, int]] = {}
    for name, start_ms, end_ms, *rest in rows:
        place, _, what = name.partition(" ")
        of, _, role = place.partition("/")
        stage, _, step = what.partition("@")
        if of not in processes:
            kind, _, number = of.partition(":")
            replica = int(number) if number and kind == "rollout" else None
            processes[of] = folder.process(kind, int(number or 0), replica=replica)
        process = processes[of]
        around = next((each for each in rest if isinstance(each, str)), "")
        more = next((each for each in rest if isinstance(each, dict)), dict[str, Any]())
        above, parent = spans[around] if around else (None, None)
        spans[stage] = process, process.span(
            stage, start_ms * MS, None if end_ms is None else end_ms * MS, role=role or None,
            step=int(step) if step else None, parent=parent if above is process else None,
            link=above.link(parent) if above and parent and above is not process else None, **more,
        )  # fmt: skip
    close(folder, lasts_ms * MS)
    return folder


def reported(folder: StepFolder, *, traces: bool = False) -> StepReport:
    """Write a step, and return its report."""
    path = folder.write()
    timeline = load_step(path)
    return step_report(timeline, load_traces(path, timeline) if traces else None)


def rules(report: StepReport) -> set[str]:
    """Return the rules of advice that speak."""
    return {advice.rule for advice in report.advice}


def timeline_of(step: Path) -> dict[str, Any]:
    """Return the merged timeline in a step's folder. Numbers with a fraction are decimals, as written."""
    content: dict[str, Any] = json.loads(
        gzip.decompress((step / "timeline.json.gz").read_bytes()), parse_float=Decimal
    )
    return content


def printed(report: StepReport, width: int = 100) -> str:
    text = StringIO()
    Console(file=text, width=width).print(render(report))
    return text.getvalue()
