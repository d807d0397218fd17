"""`stepscope what-if`: the predicted time of a captured step with a change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope_report.cli import screen
from stepscope_report.cli.find import STEPS_HELP, find_of_run
from stepscope_report.terminal.what_if import render_prediction
from stepscope_report.timeline import Timeline, load_step, span_bytes
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import predict


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
            help="Deal trajectories by their tokens, or each request to the replica with the fewest.",
        ),
    ] = None,
    cut_tail: Annotated[
        str | None,
        typer.Option(metavar="p95", help="Train as soon as 95 % of the trajectories have ended."),
    ] = None,
    tool_pool: Annotated[
        str | None, typer.Option(metavar="N", help="Tools that run at once: +2, -1, x2 or 6.")
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

    Without a change, shows how well the replay fits the step. Beyond 3 %, there is no prediction.
    """
    options = Options(
        replicas=replicas,
        balance=balance,
        cut_tail=cut_tail,
        tool_pool=tool_pool,
        staleness=staleness,
        overlap=overlap,
    )
    prediction = predict(longest_step(path, step, run), options)
    if json:
        screen.show_json(prediction)
    else:
        screen.show(render_prediction(prediction))


def longest_step(path: Path, step: int | str | None = None, run: str | None = None) -> Timeline:
    """Return the step that `path` and the options name; of several the longest."""
    chosen = find_of_run(path, step, run)
    layouts = chosen.steps.values()
    total = sum(span_bytes(layout.root) for layout in layouts)
    with screen.progress("reading spans", total) as done:
        timelines = (load_step(layout.root, run_id=chosen.run_id, on_read=done) for layout in layouts)
        return max(timelines, key=lambda timeline: timeline.window.wall_ns)
