"""The prediction of a step's time, for terminals."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope_report.formatting import count, duration, plain
from stepscope_report.terminal.layout import table
from stepscope_report.whatif.prediction import Model, Prediction

_WORK = {
    "tokens": "the time of a generation follows from its tokens, give or take {residual:.0%}",
    "durations": "generations take their measured times, which fit tokens give or take {residual:.0%}",
}
COLUMNS = ("stage", ">measured", ">replayed", ">predicted")


def render_prediction(prediction: Prediction) -> RenderableType:
    """Return the prediction in a sentence, its stages as a table, and the model below it."""
    rows = [
        (stage.name, *map(duration, (stage.measured_ns, stage.replayed_ns, stage.predicted_ns)))
        for stage in prediction.stages
    ]
    total = (prediction.measured_ns, prediction.replayed_ns, prediction.predicted_ns)
    notes = [_model(prediction.model), *(f"Assumed: {text}." for text in prediction.assumptions)]
    stages = table("Stages", COLUMNS, [*rows, ("step", *map(duration, total))], "\n".join(notes))
    return Group(Text(plain(_headline(prediction)), style="bold"), stages)


def _headline(prediction: Prediction) -> str:
    measured, replayed = duration(prediction.measured_ns), duration(prediction.replayed_ns)
    off = prediction.replayed_ns / prediction.measured_ns - 1
    if not prediction.changes:
        return (
            f"Step {prediction.step} of run {prediction.run_id}: {measured}, replayed {replayed} ({off:+.1%})"
        )
    predicted, low, high = map(duration, (prediction.predicted_ns, prediction.low_ns, prediction.high_ns))
    return (
        f"Step {prediction.step} of run {prediction.run_id}, {', '.join(prediction.changes)}: "
        f"{measured} -> {predicted} ({prediction.change:+.1%}), error bar {low} to {high}"
    )


def _model(model: Model) -> str:
    first, last = model.curve[0], model.curve[-1]
    work = f"{count(model.trajectories, 'trajectory')}, {count(model.generations, 'generation')}"
    parts = [
        f"Replayed: {work} on {count(len(model.replicas), 'replica')}",
        (
            f"a replica with {first.requests:g} in flight writes {first.tokens_per_second:,.0f} tokens/s, "
            f"with {last.requests:g} in flight {last.tokens_per_second:,.0f}"
        ),
        _WORK[model.work].format(residual=model.residual),
    ]
    if model.slots is not None:
        parts.append(f"{count(model.slots, 'request')} at once in a replica, the others wait")
    if model.tool_pool is not None:
        parts.append(f"{count(model.tool_pool, 'tool')} at once")
    if model.at_once is not None:
        parts.append(f"{count(model.at_once, 'trajectory')} at once")
    return "; ".join(parts) + "."
