"""Tokens per second of a step's rollout and training, and the use of devices by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepscope_report.accounting import clipped, union_ns
from stepscope_report.spans import generates, placed, trains
from stepscope_report.tables.counters import Counters
from stepscope_report.tables.engine import Engine
from stepscope_report.throughput.devices import Devices, Hardware
from stepscope_report.throughput.tokens import Count, rollout_tokens, train_tokens
from stepscope_report.throughput.use import StageUse, rollout_use, stage_uses
from stepscope_report.timeline import Span, Timeline, TraceActivity


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the rollout, or of training."""

    phase: str
    """`rollout` or `train`."""
    role: str | None = None
    """Of the spans that state the tokens, in training. None: of the whole step."""
    tokens: int
    source: str
    """For people: `step_tokens`, `spans turn`, `requests`, `engines' counters`."""
    per_s: float
    """Of the step's time."""
    active_ns: int | None
    """Time in which any process was in this phase. None: no span says."""
    active_per_s: float | None
    """Of that time."""
    devices: int | None
    """Number of what `unit` names. None: unknown."""
    unit: str | None
    """`GPU`, `NPU`, `rank`, `process` or `replica`."""
    per_s_each: float | None
    """`per_s` of one of these."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    rates: tuple[Rate, ...]
    uses: tuple[StageUse, ...]
    """Stages whose FLOPs are known, the most FLOPs first."""


def step_throughput(
    timeline: Timeline,
    activities: Sequence[TraceActivity],
    engines: Sequence[Engine],
    counters: Counters | None,
) -> Throughput | None:
    """Return the tokens per second and the use of devices; None if neither tokens nor FLOPs are known."""
    hardware = Hardware(timeline, activities)
    generated, trained = rollout_tokens(timeline, engines, counters), train_tokens(timeline)
    engine_devices = hardware.of_rollout(engines)
    rates = list(_rates(timeline, hardware, engine_devices, generated, trained))
    uses = stage_uses(timeline, activities, hardware, trained.get(""))
    if generated is not None and engine_devices is not None and engine_devices.unit != "replica":
        rollout = rollout_use(generated.tokens, rates[0].active_ns, engine_devices, hardware)
        uses = uses if rollout is None else (*uses, rollout)
    return Throughput(rates=tuple(rates), uses=uses) if rates or uses else None


def _rates(
    timeline: Timeline,
    hardware: Hardware,
    engine_devices: Devices | None,
    generated: Count | None,
    trained: dict[str, Count],
) -> Iterator[Rate]:
    if generated is not None:
        yield _rate(timeline, "rollout", None, generated, generates, engine_devices)
    for role, count in sorted(trained.items()):

        def counts(span: Span, role: str = role) -> bool:
            return trains(span) and role in ("", span.role)

        yield _rate(timeline, "train", role or None, count, counts, hardware.of_spans(counts))


def _rate(
    timeline: Timeline,
    phase: str,
    role: str | None,
    count: Count,
    counts: Callable[[Span], bool],
    devices: Devices | None,
) -> Rate:
    pairs = placed(timeline, filter(counts, timeline.spans))
    phase_ns = union_ns(clipped(pairs, timeline.window.start_ns, timeline.window.end_ns))
    per_s = _per_s(count.tokens, timeline.window.wall_ns) or 0.0
    return Rate(
        phase=phase,
        role=role,
        tokens=count.tokens,
        source=count.source,
        per_s=per_s,
        active_ns=phase_ns or None,
        active_per_s=_per_s(count.tokens, phase_ns),
        devices=None if devices is None else devices.number,
        unit=None if devices is None else devices.unit,
        per_s_each=None if devices is None else round(per_s / devices.number, 3),
    )


def _per_s(tokens: int, ns: int) -> float | None:
    return round(tokens * 1e9 / ns, 3) if ns else None
