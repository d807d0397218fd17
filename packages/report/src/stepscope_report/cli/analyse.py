"""`stepscope analyse`: makes raw recordings readable on a machine that has the profiler's own tools.

Some profilers leave raw data that only a tool of their vendor can read. An entry point of the group
`stepscope.analysers` names a class (or function) that is called without arguments and returns an `Analyser`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

from stepscope.errors import StepscopeError
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import STEPS_HELP, find_steps

GROUP = "stepscope.analysers"


class Analyser(Protocol):
    """Analyses one kind of recording, in a separate process."""

    name: str
    """The name in messages."""

    def waiting(self, folder: Path) -> list[Path]:
        """Return the recordings below `folder` that are not analysed yet, in order."""
        ...

    def analyse(self, recording: Path, timeout_s: float) -> str:
        """Analyse one recording and describe the result in words.

        Raises:
            StepscopeError: the analysis failed, or took longer than `timeout_s`. The recording is unchanged.
        """
        ...


def installed_analysers() -> list[Analyser]:
    """Return all installed analysers, sorted by name."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return [cast(Callable[[], Analyser], point.load())() for point in points]


def analyse(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Longest time for one recording, in seconds.", min=1)
    ] = 3600,
) -> None:
    """Make raw recordings (of NPUs) readable, on a machine that has the profiler's own tools."""
    installed = installed_analysers()
    if not installed:
        raise CommandError("no installed package analyses recordings: pip install 'stepscope[npu]'")
    roots = [layout.root for layout in find_steps(path, step)]
    work = [(tool, recording) for tool in installed for root in roots for recording in tool.waiting(root)]
    if not work:
        screen.say(f"{path}: no recording waits for an analysis")
    failed = 0
    for number, (analyser, recording) in enumerate(work, 1):
        where = recording.relative_to(path)
        with screen.waiting(f"{number} of {len(work)}: {where}"):
            try:
                outcome = analyser.analyse(recording, timeout)
            except StepscopeError as error:
                failed += 1
                screen.warn(f"{where}: FAILED: {error}")
                continue
        screen.say(f"{where}: {outcome}")
    raise typer.Exit(Exit.INCOMPLETE if failed else Exit.OK)
