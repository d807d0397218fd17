"""The stages of a step's driver before and after the rollout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from stepscope.errors import RecordError
from stepscope_report.spans import MOVES_WEIGHTS
from stepscope_report.timeline import Span, Timeline
from stepscope_report.whatif.model import DriverStage, StageKind

_BESIDE = 0.03
"""Part of the step that the driver may spend in other stages while trajectories run."""
_REWARD = re.compile(r"reward|score", re.IGNORECASE)
REST = "between stages"
"""Name of the time in which the driver is in no stage."""


def driver_stages(
    timeline: Timeline, begin_ns: int, end_ns: int
) -> tuple[list[DriverStage], list[DriverStage]]:
    """Return the stages before and after the rollout from `begin_ns` to `end_ns`, with the time between them.

    Raises:
        RecordError: a stage of the driver runs beside the rollout.
    """
    spans = list(_stages(timeline, begin_ns, end_ns))
    _check(timeline, spans, begin_ns, end_ns)
    window = timeline.window
    return _cut(spans, window.start_ns, begin_ns), _cut(spans, end_ns, max(window.end_ns, end_ns))


def _stages(timeline: Timeline, begin_ns: int, end_ns: int) -> Iterator[Span]:
    """Yield the outermost spans of the driver. One around the rollout and more is replaced by those below."""
    below: dict[int | None, list[int]] = {}
    for index, span in enumerate(timeline.spans):
        if timeline.processes[span.process].owner and span.trajectory is None:
            below.setdefault(span.parent, []).append(index)
    todo = list(reversed(below.get(None, [])))
    while todo:
        index = todo.pop()
        span = timeline.spans[index]
        around = span.start_ns <= begin_ns and timeline.until_ns(span) >= end_ns
        if around and index in below:
            todo += reversed(below[index])
        elif not around:
            yield span


def _check(timeline: Timeline, spans: Iterable[Span], begin_ns: int, end_ns: int) -> None:
    for span in spans:
        beside_ns = min(timeline.until_ns(span), end_ns) - max(span.start_ns, begin_ns)
        covers = beside_ns >= 0.9 * (end_ns - begin_ns)
        if not covers and not span.waits and beside_ns > _BESIDE * timeline.window.wall_ns:
            raise RecordError(
                f"step {timeline.step}: {span.role} {span.stage} runs beside the rollout. Only steps whose "
                "training waits for all trajectories can be replayed"
            )


def _cut(spans: Sequence[Span], from_ns: int, until_ns: int) -> list[DriverStage]:
    stages: list[DriverStage] = []
    at_ns, rest_ns = from_ns, 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        start_ns, end_ns = max(span.start_ns, at_ns), min(span.end_ns or until_ns, until_ns)
        if start_ns < end_ns:
            rest_ns += start_ns - at_ns
            stages.append(DriverStage(f"{span.role} {span.stage}", _kind(span), end_ns - start_ns))
            at_ns = end_ns
    rest_ns += max(0, until_ns - at_ns)
    return [*stages, DriverStage(REST, "other", rest_ns)] if rest_ns else stages


def _kind(span: Span) -> StageKind:
    if MOVES_WEIGHTS.search(span.stage):
        return "weights"
    return "reward" if span.role == "reward" or _REWARD.search(span.stage) else "train"
