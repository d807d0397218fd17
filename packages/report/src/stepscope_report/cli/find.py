"""The captured steps that a path on the command line names, and the processes that read their traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from stepscope.config import parse_steps
from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest_parts import read_parts
from stepscope.files.requests import has_died, read_listening
from stepscope.files.run import RunRecord, RunSteps, steps_of_run
from stepscope.files.storage import read_record
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.formatting import numbers
from stepscope_report.sections.health import say_others
from stepscope_report.timeline.plain import has_traces, no_trace
from stepscope_report.timeline.processes import workers
from stepscope_report.timeline.sources import read_sources

if TYPE_CHECKING:
    from stepscope_report.cli.ray_nodes import RayNodes

STEPS_HELP = "Only these steps of a run: 3, 3-7, 3,5,8-, 10:50:10 (50 is not in it), every:50."
"""Help text of the option `--step`, the same for every command."""
_SHOWN = 10


def find_run(path: Path) -> dict[int, StepLayout]:
    """Return the captured steps of a run, by number.

    Raises:
        CommandError: `path` is no run, or holds no captured step. The message names what `path` holds.
    """
    layout = RunLayout(path)
    steps = layout.steps()
    if steps:
        return steps
    records = [path for path in layout.runs() if path.is_file()]
    if records:
        why = f"{deaths(layout)}{_why_none(records[0])}"
        raise CommandError(f"{path} holds no captured step. {why}", Exit.INCOMPLETE)
    raise CommandError(no_run(path))


def find_numbered(path: Path) -> dict[int, StepLayout]:
    """Return the steps as `find_run` does, and also accept the folder of a single step, whatever its name.

    Raises:
        CommandError: as for `find_run`, or no process of the step recorded the step's number.
    """
    if not is_step(path):
        return find_run(path)
    layout = StepLayout(path)
    recorded = read_parts(layout)[0] or read_sources(layout, spans=False)[0]
    if not recorded:
        raise CommandError(f"{path} is the folder of a step of unknown number: give the run's: {path.parent}")
    return {recorded[0].step: layout}


def find_steps(path: Path, step: int | str | None = None) -> list[StepLayout]:
    """Return the steps of all runs that `path` (a run's folder or a step's) and the option `step` select.

    Args:
        step: The number of a step, or several in the notation of the setting `steps`, such as `3,5-8`.

    Raises:
        CommandError: `step` selects no captured step. The message names the captured steps.
        ConfigError: `step` is not a valid list of steps.
    """
    if is_step(path):
        if step is not None:
            raise CommandError(
                f"{path} is the folder of one step: omit --step, or give the run's: {path.parent}"
            )
        return [StepLayout(path)]
    return list(_wanted(path, step).values())


def find_of_run(path: Path, step: int | str | None = None, run: str | None = None) -> RunSteps:
    """Return the steps of `find_steps` that belong to one run, and name the other steps on stderr.

    Args:
        run: Id of the run. None for the run that captured last.

    Raises:
        CommandError: as for `find_steps`, or the selected steps all belong to other runs.
        ConfigError: `step` is not a valid list of steps.
    """
    if is_step(path):
        (layout,) = find_steps(path, step)
        return RunSteps(run, {0: layout}, {}, 0)
    return of_one_run(path, _wanted(path, step), run)


def of_one_run(path: Path, steps: Mapping[int, StepLayout], run: str | None) -> RunSteps:
    """Return the steps of one run, and print on stderr which steps of other runs are left out.

    Args:
        run: Id of the run. None for the run that captured last.

    Raises:
        CommandError: none of the steps belongs to `run`.
    """
    chosen = steps_of_run(steps, run)
    if not chosen.opened_ns and run is not None:
        asked = f"step {numbers(steps)}" if len(steps) < len(RunLayout(path).steps()) else "step"
        raise CommandError(f"{path} holds no {asked} of run {run!r}. Runs: {_some(chosen.others)}")
    if chosen.others:
        screen.say(say_others(chosen.run_id, chosen.others))
    return chosen


def _wanted(path: Path, step: int | str | None) -> dict[int, StepLayout]:
    steps = find_run(path)
    ranges = () if step is None else parse_steps([""] if step == "" else step, "--step")
    wanted = {
        number: layout
        for number, layout in steps.items()
        if not ranges or any(number in part for part in ranges)
    }
    absent = [part for part in ranges if part.stop == part.start + 1 and part.start not in steps]
    if absent or not wanted:
        which = ",".join(map(str, absent)) or step
        raise CommandError(f"{path} holds no step {which}. Captured: {_some(map(str, steps))}")
    return wanted


def is_step(path: Path) -> bool:
    """Return True if `path` is the folder of a step."""
    return StepLayout(path).is_step


def read_run(path: Path) -> RunRecord | None:
    """Return the record in the file `run.json`, or None if the file is missing or damaged."""
    try:
        return read_record(path, RunRecord)
    except (OSError, RecordError):
        return None


def deaths(layout: RunLayout) -> str:
    """Return a sentence that ends in a space if the newest process that opens captures was killed or failed.
    Otherwise return an empty text.
    """
    last = max(read_listening(layout), key=lambda one: one.since_ns, default=None)
    if last is None or not has_died(last):
        return ""
    step = "" if last.step is None else f" in step {last.step} or later"
    return f"{last.process.key} was killed, or failed,{step}, and its steps in memory are lost. "


def _why_none(path: Path) -> str:
    record = read_run(path)
    if record is None:
        return f"{path.name} cannot be read."
    steps = record.config.get("steps")
    if not steps:
        return f'{path.name} selects no step: set `steps`, for instance steps: [2, "10:50:10"].'
    return f"{path.name} selects steps {steps}: the run has reached none of them, or their folders are gone."


def no_run(path: Path) -> str:
    """Return the reason why `path` is no run with captured steps, and what the folder holds."""
    if not path.exists():
        above = next(parent for parent in path.absolute().parents if parent.exists())
        return f"{path} does not exist. {above} holds: {_names(above)}"
    if not path.is_dir():
        return f"{path} is {no_trace(path)}; give a trace, or the folder of a run (save_path) or of a step"
    inside = next(
        (parent for parent in path.absolute().parents if StepLayout(parent).processes.is_dir()), None
    )
    if inside is not None:
        return f"{path} is a folder inside a step: give the step's: {inside}"
    below = [child.name for child in path.iterdir() if child.is_dir() and RunLayout(child).steps()]
    if below:
        return f"{path} is no run, but there are runs in it: {_some(sorted(below))}"
    traces = "It holds no trace either."
    if has_traces(path):
        traces = f"`stepscope report {path}` reads its traces."
    return (
        f"{path} holds no captured step: looked for run.json and folders like step_000002; it holds: "
        f"{_names(path)}. {traces} If a run should write here: is `save_path` this folder, does "
        "the training loop open `capture(step)`, and does `steps` select any that it reaches (see "
        "`stepscope validate`)?"
    )


def _names(folder: Path) -> str:
    try:
        return _some(sorted(child.name for child in folder.iterdir()))
    except OSError as error:
        return f"({error.strerror})"


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more if every else "nothing"


RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Also read traces that only other nodes of a Ray cluster have. `auto`: the cluster of this "
        "machine.",
    ),
]


@contextmanager
def readers(
    jobs: int | None, ray: str | None, steps: list[StepLayout], size: Callable[[], int]
) -> Iterator[tuple[Executor | None, int]]:
    """Yield (executor that reads the traces of these steps, size of the traces in bytes). The executor is
    None if this process reads them.

    Args:
        jobs: Number of processes, on each node if `ray` is given. None for one per idle core.
        ray: Address of a Ray cluster. None for processes of this machine.
        size: Returns the size in bytes of the traces on this machine.
    """
    if ray is None:
        total = size()
        with workers(jobs, total) as executor:
            yield executor, total
        return
    with cluster(ray, jobs, steps) as nodes:
        yield nodes, size() + sum(nodes.elsewhere.values())


def absolute(path: Path, ray: str | None) -> Path:
    """Return the path, made absolute if `ray` is given, so that it is valid on the cluster's nodes too."""
    return path if ray is None else Path(os.path.abspath(path))


@contextmanager
def cluster(address: str, jobs: int | None, steps: list[StepLayout]) -> Iterator[RayNodes]:
    """Yield the nodes of a Ray cluster, after they have listed the files of these steps."""
    if find_spec("ray") is None:
        raise CommandError("--ray needs Ray: pip install ray, of the version of the cluster")
    from stepscope_report.cli.ray_nodes import connected  # here, because importing Ray takes a second

    with connected(address, jobs) as nodes:
        for step in steps:
            nodes.add_step(step)
        yield nodes
