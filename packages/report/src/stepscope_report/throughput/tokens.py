"""Tokens of a step: from `step_tokens`, else from attributes of spans, else from engines' counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.files.counters import GENERATION_TOKENS
from stepscope.files.spans import SERVED
from stepscope_report.accounting import Label
from stepscope_report.sections.counters import Counters
from stepscope_report.sections.engines import Engine
from stepscope_report.spans import above, generates, is_of, label_of, trains, whole
from stepscope_report.timeline import Span, Timeline


class Count(NamedTuple):
    """A number of tokens, and its source for people."""

    tokens: int
    source: str


def rollout_tokens(timeline: Timeline, engines: Sequence[Engine], counters: Counters | None) -> Count | None:
    """Return the tokens that were generated in the step, or None if it is not known."""
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
        own, label = _stated(span), label_of(span)
        if own is not None and not _is_stated_above(timeline, span, is_of(label)):
            sums[label] += own
    return dict(sums)


def _counted(timeline: Timeline, kind: str) -> Count | None:
    numbers = [value for mark in timeline.tokens if (value := _stated(mark, kind)) is not None]
    return Count(sum(numbers), "step_tokens") if numbers else None


def _of_spans(timeline: Timeline, counts: Callable[[Span], bool]) -> dict[str, Count]:
    """Return the sums over the outermost spans that state them, by role, and of all under an empty role."""
    sums: dict[str, int] = defaultdict(int)
    stages: dict[str, dict[str, None]] = defaultdict(dict)
    for span in timeline.spans:
        own = _stated(span) if counts(span) else None
        if own is None or _is_stated_above(timeline, span, counts):
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


def _is_stated_above(timeline: Timeline, span: Span, counts: Callable[[Span], bool]) -> bool:
    return any(counts(outer) and _stated(outer) is not None for outer in above(timeline, span))


def _stated(span: Span, name: str = "tokens") -> int | None:
    value = whole(span, name)
    return value if value is not None and value >= 0 else None
