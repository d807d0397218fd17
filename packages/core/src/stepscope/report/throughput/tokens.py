"""Tokens of a step: from `step_tokens`, else from attributes of spans, else from engines' counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stepscope.files.counters import GENERATION_TOKENS
from stepscope.report.accounting import Label
from stepscope.report.tables.counters import Counters
from stepscope.report.tables.engine import Engine
from stepscope.report.tables.replicas import SERVED
from stepscope.report.throughput.stages import generates, trains
from stepscope.timeline import Span, Timeline


class Count(NamedTuple):
    """A number of tokens, and its source for people."""

    tokens: int
    source: str


def rollout_tokens(timeline: Timeline, engines: Sequence[Engine], counters: Counters | None) -> Count | None:
    """Return the tokens that were generated in the step. None: nothing says."""
    return (
        _counted(timeline, "rollout")
        or _of_spans(timeline, lambda span: generates(span) and span.stage not in SERVED).get("")
        or _of_engines(engines)
        or _of_counters(counters)
    )


def train_tokens(timeline: Timeline) -> dict[str, Count]:
    """Return the tokens that were trained on, by role. The role is empty if `step_tokens` counted them."""
    counted = _counted(timeline, "train")
    if counted is not None:
        return {"": counted}
    by_role = _of_spans(timeline, trains)
    by_role.pop("", None)
    return by_role


def stage_tokens(timeline: Timeline) -> dict[Label, int]:
    """Return the sums of the attribute `tokens` by stage. Of nested calls of a stage the outermost counts."""
    sums: Counter[Label] = Counter()
    for span in timeline.spans:
        own = _stated(span)
        label = span.role, span.stage
        if own is not None and not any(
            (above.role, above.stage) == label and _stated(above) is not None
            for above in _above(timeline, span)
        ):
            sums[label] += own
    return dict(sums)


def _counted(timeline: Timeline, kind: str) -> Count | None:
    numbers = [value for mark in timeline.tokens if (value := _whole(mark, kind)) is not None]
    return Count(sum(numbers), "step_tokens") if numbers else None


def _of_spans(timeline: Timeline, counts: Callable[[Span], bool]) -> dict[str, Count]:
    """Return the sums over the outermost spans that state them, by role, and of all under an empty role."""
    sums: dict[str, int] = defaultdict(int)
    stages: dict[str, dict[str, None]] = defaultdict(dict)
    for span in timeline.spans:
        own = _stated(span) if counts(span) else None
        if own is None or any(
            counts(above) and _stated(above) is not None for above in _above(timeline, span)
        ):
            continue
        for role in ("", span.role):
            sums[role] += own
            stages[role][span.stage] = None
    return {role: Count(number, f"spans {', '.join(stages[role])}") for role, number in sums.items()}


def _of_engines(engines: Sequence[Engine]) -> Count | None:
    known = [engine for engine in engines if engine.output_tokens is not None]
    if not known:
        return None
    sources = {"requests" if engine.requests is not None else "engines' counters" for engine in known}
    return Count(sum(engine.output_tokens or 0 for engine in known), ", ".join(sorted(sources)))


def _of_counters(counters: Counters | None) -> Count | None:
    rows = () if counters is None else counters.rows
    grown = [row.increase for row in rows if row.name == GENERATION_TOKENS and row.increase is not None]
    return Count(round(sum(grown)), "engines' counters") if grown else None


def _above(timeline: Timeline, span: Span) -> Iterator[Span]:
    parent = span.parent
    while parent is not None:
        yield timeline.spans[parent]
        parent = timeline.spans[parent].parent


def _stated(span: Span) -> int | None:
    return _whole(span, "tokens")


def _whole(span: Span, name: str) -> int | None:
    value = (span.attrs or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
