"""Steps of known content in a few lines, and reports as text, for tests of what a report makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from pathlib import Path

from rich.console import Console

from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import StepReport
from stepscope_report.terminal import render

MS = 1_000_000
Row = tuple[str, int, int] | tuple[str, int, int, str]
"""A span: "[process/]role stage[@step]", its start and end in ms, and the stage of the span around it."""


def close(folder: StepFolder, at_ns: int) -> None:
    for process in folder.processes:
        process.close(at_ns)


def a_step(root: Path, lasts_ms: int, rows: Iterable[Row]) -> StepFolder:
    """Return a step of a trainer, which owns it, and of the processes of `rows`, such as "rollout:1"."""
    folder = StepFolder(root)
    processes = {"trainer": folder.process("trainer", owner=True)}
    spans: dict[str, tuple[FakeProcess, int]] = {}
    for name, start_ms, end_ms, *around in rows:
        place, _, what = name.rpartition(" ")
        of, _, role = place.partition("/")
        stage, _, step = what.partition("@")
        if of not in processes:
            kind, _, number = of.partition(":")
            processes[of] = folder.process(kind, int(number or 0), replica=int(number) if number else None)
        process = processes[of]
        above, parent = spans[around[0]] if around else (None, None)
        spans[stage] = process, process.span(
            stage, start_ms * MS, end_ms * MS, role=role or None, step=int(step) if step else None,
            parent=parent if above is process else None,
            link=above.link(parent) if above and parent and above is not process else None,
        )  # fmt: skip
    close(folder, lasts_ms * MS)
    return folder


def printed(report: StepReport, width: int = 100) -> str:
    text = StringIO()
    Console(file=text, width=width).print(render(report))
    return text.getvalue()
