"""`stepscope what-if`: the predicted duration of a captured step with a change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from stepscope_report.cli import screen
from stepscope_report.cli.find import STEPS_HELP, find_of_run
from stepscope_report.formatting import count, duration, plain
from stepscope_report.terminal_blocks import table
from stepscope_report.timeline import Timeline, load_step, span_bytes
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Model, Prediction, predict

_WORK = {
    "tokens": "the time of a generation follows from its tokens, give or take {residual:.0f} %",
    "durations": "generations take their measured times, which fit tokens give or take {residual:.0f} %",
}


def render_prediction(prediction: Prediction) -> RenderableType:
    """Return the prediction for a terminal: a sentence, a table of stages, and the model below."""
    columns = ["stage", ">calls", ">measured", ">replayed", ">with the change"]
    rows: list[tuple[str, str, int | None, int | None, int]] = [
        (stage.name, str(stage.calls), stage.measured_ns, stage.replayed_ns, stage.predicted_ns)
        for stage in prediction.stages
    ]
    notes = [_model(prediction.model), *(f"Assumed: {text}." for text in prediction.assumptions)]
    off_ns = prediction.predicted_ns - sum(stage.predicted_ns for stage in prediction.stages)
    if off_ns:
        rows.append(("error of the replay", "", None, None, off_ns))
    rows.append(("step", "", prediction.measured_ns, prediction.replayed_ns, prediction.predicted_ns))
    width = len(columns) if prediction.changes else len(columns) - 1  # without changes there is no prediction
    cells = [(name, calls, *map(duration, times))[:width] for name, calls, *times in rows]
    stages = table("Stages", columns[:width], cells, "\n".join(notes))
    return Group(Text(plain(_headline(prediction)), style="bold"), stages)


def _headline(prediction: Prediction) -> str:
    measured, replayed = duration(prediction.measured_ns), duration(prediction.replayed_ns)
    step = f"Step {prediction.step} of run {prediction.run_id}"
    if not prediction.changes:
        off = 100 * (prediction.replayed_ns / prediction.measured_ns - 1)
        return f"{step}: {measured}, replayed {replayed} ({off:+.1f} %)"
    predicted, low, high = map(duration, (prediction.predicted_ns, prediction.low_ns, prediction.high_ns))
    return (
        f"{step}, {', '.join(prediction.changes)}: {measured} -> {predicted} "
        f"({100 * prediction.change:+.1f} %), error bar {low} to {high}"
    )


def _model(model: Model) -> str:
    first, last = model.curve[0], model.curve[-1]
    work = f"{count(model.trajectories, 'trajectory')}, {count(model.generations, 'generation')}"
    parts = [
        f"Replayed: {work} on {count(len(model.replicas), 'replica')}",
        (
            f"a replica with {first.requests:g} in flight writes {first.tokens_per_second:,.0f} tokens/s, "
            f"with {last.requests:g} in flight {last.tokens_per_second:,.0f}"
            f"{', as its forward passes measured' if model.measured else ''}"
        ),
        _WORK[model.work].format(residual=100 * model.residual),
    ]
    if model.slots is not None:
        parts.append(f"{count(model.slots, 'request')} at once in a replica, the others wait")
    if model.tool_pool is not None:
        parts.append(f"{count(model.tool_pool, 'tool')} at once")
    if model.at_once is not None:
        parts.append(f"{count(model.at_once, 'trajectory')} at once")
    return "; ".join(parts) + "."


def what_if(
    path: Annotated[
        Path, typer.Argument(metavar="STEP_OR_RUN", help="Folder of a step, or of a run: its longest step.")
    ],
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's id, where several wrote into one folder.")
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N", help="Inference replicas: +2, -1, x2 or 6.")
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="length|load",
            help="Assign trajectories by their tokens, or each request to the replica with the fewest.",
        ),
    ] = None,
    cut_tail: Annotated[
        str | None,
        typer.Option(metavar="p95", help="Train as soon as 95 % of the trajectories have ended."),
    ] = None,
    tool_pool: Annotated[
        str | None, typer.Option(metavar="N", help="Tools that run at once: +2, -1, x2 or 6.")
    ] = None,
    max_requests: Annotated[
        str | None, typer.Option(metavar="N", help="Requests at once in a replica: +8, -8, x2 or 64.")
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(metavar="1", help="Run the rollout of the next step beside the training.")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="reward", help="Score trajectories as they end.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON; times in ns.")] = False,
) -> None:
    """Predict how long a captured step would take with a change, by a replay of it. Changes add up.

    Without a change, shows how well the replay fits the step. If the two differ by more than 3 %, there is no
    prediction.
    """
    options = Options(
        replicas=replicas,
        balance=balance,
        cut_tail=cut_tail,
        tool_pool=tool_pool,
        max_requests=max_requests,
        staleness=staleness,
        overlap=overlap,
    )
    prediction = predict(longest_step(path, step, run), options)
    if json:
        screen.show_json(prediction)
    else:
        screen.show(render_prediction(prediction))


def longest_step(path: Path, step: int | str | None = None, run: str | None = None) -> Timeline:
    """Return the step that `path` and the options select. If they select several, return the longest."""
    chosen = find_of_run(path, step, run)
    layouts = chosen.steps.values()
    total = sum(span_bytes(layout.root) for layout in layouts)
    with screen.progress("reading spans", total) as done:
        timelines = (load_step(layout.root, run_id=chosen.run_id, on_read=done) for layout in layouts)
        return max(timelines, key=lambda timeline: timeline.window.wall_ns)
