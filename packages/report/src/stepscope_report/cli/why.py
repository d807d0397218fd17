"""`stepscope why`: the open calls of a run right now, and the call that the others wait for.

Modules that read steps on disk are imported where they are used, because their import takes longer than the
answer of a live run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.run import steps_of_run
from stepscope.files.states import ProcessState
from stepscope.files.steps import StepLine, read_step_lines, recorded_runs
from stepscope_report.cli import screen
from stepscope_report.cli.asking import Question, dead_owners, fates
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.formatting import duration, middle, plain
from stepscope_report.live import COMPARED, usual_ns
from stepscope_report.terminal_blocks import listing
from stepscope_report.waiting import say_call
from stepscope_report.why import Why, is_dead, say_first
from stepscope_report.why import why as join


def why(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run: its save_path.")],
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to wait for answers.")] = 3.0,
    json: Annotated[bool, typer.Option("--json", help="As JSON; times in ns.")] = False,
) -> None:
    """Ask every process of a run what it does right now, and name the call that holds the others.

    For runs with a `save_path` and without `record: off`. If no process answers, show the calls without an
    end in the last step on disk.
    """
    if not run.is_dir():
        from stepscope_report.cli.find import no_run

        raise CommandError(no_run(run))
    layout = RunLayout(run)
    asked: Question | None = context.obj
    states = ask(layout, wait) if asked is None else _answers(asked, wait)
    if not states:
        _show_last_step(run, json)
    answer = join(states, fates(states), dead_owners(layout, states))
    if json:
        screen.show_json(answer)
    else:
        screen.show(*render(answer, _usual(layout, answer.step)))
    raise typer.Exit(Exit.OK if not answer.silent else Exit.INCOMPLETE)


def ask(layout: RunLayout, wait_s: float) -> list[ProcessState]:
    """Return the states of all processes that answer within `wait_s`. Return early if every expected process
    has answered, or if no further answer came for a second.
    """
    with closing(Question(layout)) as question:
        return _answers(question, wait_s)


def _answers(question: Question, wait_s: float) -> list[ProcessState]:
    with screen.waiting("waiting for answers"):
        return question.answers(wait_s)


def step_lines(layout: RunLayout) -> list[StepLine]:
    """Return the step lines of the newest run that has step lines; empty if there is none."""
    runs = recorded_runs(layout.root)
    return read_step_lines(layout.step_lines(next(iter(runs)))) if runs else []


def _usual(layout: RunLayout, step: int | None) -> str:
    lines = step_lines(layout)
    usual = usual_ns(lines, step)
    return f" ({say_median(len(usual), len(lines))}: {duration(middle(usual))})" if usual else ""


def say_median(compared: int, steps: int) -> str:
    """Return a name for the steps of a median: `median of the last 50`, or `median of 12 of its kind`.

    Args:
        compared: Number of steps in the median.
        steps: Number of all recorded steps of the run.
    """
    every = compared == min(steps, COMPARED)
    return f"median of the last {compared}" if every else f"median of {compared} of its kind"


def render(answer: Why, usual: str) -> Iterator[RenderableType]:
    """Yield the answer for a terminal.

    Args:
        usual: Text about the usual duration of a step, or empty.
    """
    step = "No step runs" if answer.step_age_ns is None else f"Step {answer.step} runs"
    age = "" if answer.step_age_ns is None else f" for {duration(answer.step_age_ns)}{usual}"
    yield Text(f"{step}{age}. Run {answer.run_id}", style="bold")
    yield from _calls(answer)


def _calls(answer: Why) -> Iterator[RenderableType]:
    if answer.culprits:
        yield Text(say_first(answer), style="bold")
        if answer.beside:
            yield listing("Beside it in that process", answer.beside)
        more = [say_call(answer.calls[index]) for index in answer.culprits[max(1, answer.circle) :]]
        if more:
            dead = is_dead(answer.calls[answer.culprits[0]])
            yield listing("Wait for no other call" if dead else "Also wait for no other call", more)
    waiting = list(_waiting(answer))
    if waiting:
        yield listing("Wait for others", waiting)
    if answer.engines:
        yield listing("Engines", answer.engines)
    if answer.idle:
        yield listing("In no call", answer.idle)
    if answer.silent:
        note = "gone, on a host without this folder, or in C with the interpreter's lock held (py-spy dump)"
        yield listing("No answer", [f"{name}: {answer.fates.get(name, note)}" for name in answer.silent])


def _waiting(answer: Why) -> Iterator[str]:
    for call in answer.calls:
        if call.waits_for:
            others = [answer.calls[index] for index in call.waits_for[:8]]
            names = ", ".join(f"{other.process} {other.stage}".rstrip() for other in others)
            more = f" and {len(call.waits_for) - 8} more" if len(call.waits_for) > 8 else ""
            yield f"{say_call(call)}; waits for {names}{more}"


def _show_last_step(run: Path, json: bool) -> None:
    """Show how the last step on disk ended. Always end the command by an exception."""
    from stepscope_report.cli import find
    from stepscope_report.sections.health import known_dead, say_deaths, say_span, step_health
    from stepscope_report.timeline import load_step

    chosen = steps_of_run(RunLayout(run).steps())
    number, layout = max(chosen.steps.items(), default=(0, None))
    timeline = None
    if layout is not None:
        with suppress(RecordError):
            timeline = load_step(layout.root, run_id=chosen.run_id)
    health = None if timeline is None else step_health(timeline)
    rows = [] if health is None else [say_span(row) for row in health.open_spans]
    died = "" if health is None else say_deaths(health)
    if timeline is not None and timeline.states:
        answer = join(timeline.states, dead=known_dead(timeline))
        title = f"No process answers. Step {number}, the last on disk, ended like this"
        screen.show_json(answer) if json else screen.show(Text(title), *_calls(answer))
    elif rows:
        screen.show(
            *([Text(f"Step {number}: {died}", style="bold")] if died else []),
            listing(f"No process answers. Step {number}, the last on disk, has calls without an end", rows),
        )
    else:
        error = None if health is None else health.user_error
        ended = ". ".join(filter(None, (died, error and f"It ended early: {plain(error)}")))
        fix = f"stepscope report {run} --step {number}" if ended else _fix(RunLayout(run))
        last = (
            f"step {number} has no open call. {ended}" if ended else "its last step on disk has no open call"
        )
        lost = "" if ended else find.deaths(RunLayout(run))
        raise CommandError(
            f"no process of the run in {run} answers, and {last}. {lost}Fix: {fix}",
            Exit.INCOMPLETE,
        )
    raise typer.Exit(Exit.INCOMPLETE)


def _fix(layout: RunLayout) -> str:
    from stepscope_report.cli.find import read_run

    records = [record for file in layout.runs() if (record := read_run(file)) is not None]
    newest = max(records, key=lambda record: record.started_ns, default=None)
    # A run that was killed at once has no `run.json`. Step lines also show that the recorder was on.
    is_on = bool(recorded_runs(layout.root)) if newest is None else newest.config.get("record") == "spans"
    if is_on:
        return "if the run ended, look at its log; if not, its hosts may not share this folder"
    return "set save_path, and not record: off, in the run's configuration; or look at the program's log"
