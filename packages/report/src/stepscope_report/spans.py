"""Meaning of spans for a report: their stages, roles and attributes, and the names of tools."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from stepscope.files.spans import MOST_NAMES, OTHER_NAMES, PROFILING, SERVED, WAITING
from stepscope_report.accounting import Label, Pair
from stepscope_report.timeline import Process, Span, Timeline
from stepscope_report.timeline.model import GENERATES as GENERATES
from stepscope_report.timeline.model import ROLLOUT as ROLLOUT
from stepscope_report.timeline.tree import replica_and_role

_Name = TypeVar("_Name", str, Label)

_MOVES = "sync|load|update|broadcast|transfer|push|pull|send|recv|receiv|export|publish|fetch"
MOVES_WEIGHTS = re.compile(
    rf"(weight|param).*({_MOVES})|({_MOVES}).*(weight|param)|reshard",
    re.IGNORECASE,
)
TRANSFER = "sync_weights (between its ends)"
"""Stage for the time between the trainer's span and the engine's span of a weight sync."""
_TRAINS = re.compile(r"update|train|learn|backward|optimi[sz]", re.IGNORECASE)
_NAMES = 4096
"""Number of stage names whose meaning is cached: a step has many spans of few stages."""
_FIXED = SERVED | WAITING | {"trajectory", "turn", PROFILING}
"""Stages that stepscope itself names. They keep their names even if there are many others."""
_ID = re.compile(r"\d+|[0-9a-f]{6,}")
_SURELY = 10 * MOST_NAMES
"""If there are at least this many names, they count as ids or texts, whatever their form."""
MOST = 20
"""If the tools of a stage have more names than this, the names are of calls and not of tools."""
_LENGTH = 40


def is_transfer(before: Label | None, after: Label | None) -> bool:
    """Return whether the time between the stages `before` and `after` is a transfer of weights.

    Weights go from the trainer to the rollout. The time from the rollout to the trainer belongs to training.
    """
    if before is None or after is None or before[0] == "rollout" or after[0] != "rollout":
        return False
    return all(MOVES_WEIGHTS.search(stage) for _, stage in (before, after))


def is_tool(role: str, stage: str) -> bool:
    """Return whether a stage is a tool or an environment that a trajectory calls."""
    return role == "env" or stage.lower().startswith("tool")


def trains(span: Span) -> bool:
    """Return whether a span trains: forward, backward and optimizer, or a part of such a stage."""
    return not span.waits and span.role not in ROLLOUT and _is_training(span.stage)


def generates(span: Span) -> bool:
    """Return whether a span is work of the rollout, and not only a wait."""
    return span.role in GENERATES and not span.waits and not _moves_weights(span.stage)


@lru_cache(_NAMES)
def _is_training(stage: str) -> bool:
    return not _moves_weights(stage) and _TRAINS.search(stage) is not None


@lru_cache(_NAMES)
def _moves_weights(stage: str) -> bool:
    return MOVES_WEIGHTS.search(stage) is not None


def label_of(span: Span) -> Label:
    return span.role, span.stage


def is_of(label: Label) -> Callable[[Span], bool]:
    """Return a function that returns True for spans with this label."""
    return lambda span: label_of(span) == label


def whole(span: Span, name: str) -> int | None:
    """Return the value of an attribute, or None if the attribute is absent or is no whole number."""
    value = (span.attrs or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def above(timeline: Timeline, span: Span) -> Iterator[Span]:
    """Yield the spans around a span, the innermost first. The span itself is not included."""
    while span.parent is not None:
        span = timeline.spans[span.parent]
        yield span


class ReplicaKey(NamedTuple):
    """An inference replica of the step."""

    number: int
    role: str = ""
    """The role, if `Timeline.shared_numbers` contains this replica; else empty."""

    @property
    def name(self) -> str:
        """Printed name: `replica 0`, or `teacher replica 0` with a role."""
        return f"{self.role} replica {self.number}".lstrip()


def replica_of(timeline: Timeline, span: Span) -> ReplicaKey | None:
    """Return the replica that a span belongs to, by its attribute or else by its process. None if neither
    names a replica.
    """
    number, role = replica_and_role(timeline, span)
    return None if number is None else _key(timeline, number, role)


def replica_of_process(timeline: Timeline, process: Process) -> ReplicaKey | None:
    """Return the replica that a process is or belongs to, or None if the process names no replica."""
    number = process.info.replica
    return None if number is None else _key(timeline, number, process.info.role)


def _key(timeline: Timeline, number: int, role: str) -> ReplicaKey:
    return ReplicaKey(number, role if (role, number) in timeline.shared_numbers else "")


def placed(timeline: Timeline, spans: Iterable[Span]) -> list[Pair]:
    """Return (start, end) of the spans of aligned processes."""
    return [
        (span.start_ns, timeline.until_ns(span)) for span in spans if timeline.processes[span.process].aligned
    ]


class ManyNames(NamedTuple):
    """The names of stages and roles in a step that has too many of them for the rows of a table."""

    names: int
    example: Label
    ids: bool
    """True if the names contain ids: without the ids, at most half as many names are left, or there are more
    names than a program has stages."""


def few_names(timeline: Timeline) -> tuple[Timeline, ManyNames | None]:
    """Return (timeline with few names of stages and roles, `ManyNames` or None if nothing was renamed).

    The stages and roles with the most time keep their names, and the other stages and roles share one name.

    A table has a row for each name, and an instant is split among the names that run. Without this limit, a
    name that contains an id would make the report take hours.
    """
    times, roles = Counter[Label](), Counter[str]()
    for span in timeline.spans:
        ns = timeline.until_ns(span) - span.start_ns
        times[span.role, span.stage] += ns
        roles[span.role] += ns
    kept_roles = _longest(roles) | GENERATES
    kept = _longest({label: ns for label, ns in times.items() if label[1] not in _FIXED})
    new_of = {
        (role, stage): (
            role if role in kept_roles else OTHER_NAMES,
            stage if stage in _FIXED or (role, stage) in kept else OTHER_NAMES,
        )
        for role, stage in times
    }
    others = [label for label, new in new_of.items() if label != new]
    if not others:
        return timeline, None
    spans = [_renamed(span, *new_of[span.role, span.stage]) for span in timeline.spans]
    kinds = {(_ID.sub("", role), _ID.sub("", stage)) for role, stage in times}
    ids = 2 * len(kinds) <= len(times) or len(times) >= _SURELY
    many = ManyNames(len(times), max(others, key=times.__getitem__), ids)
    return msgspec.structs.replace(timeline, spans=spans), many


def _longest(times: Mapping[_Name, int]) -> Set[_Name]:
    return set(heapq.nlargest(MOST_NAMES, times, key=lambda name: (times[name], name)))


def _renamed(span: Span, role: str, stage: str) -> Span:
    if (span.role, span.stage) == (role, stage):
        return span
    return msgspec.structs.replace(span, role=role, stage=stage)


class ToolNames:
    """The names of the tools of a step, by the attribute `name` of their spans."""

    def __init__(self, timeline: Timeline) -> None:
        names: dict[Label, set[str]] = defaultdict(set)
        for span in timeline.spans:
            name = _tool_name(span)
            if name is not None:
                names[span.role, span.stage].add(name)
        self._named = {label for label, own in names.items() if len(own) <= MOST}
        self._parts = {
            (role, title(stage, name)): (stage, name)
            for role, stage in self._named
            for name in names[role, stage]
        }

    def label_of(self, span: Span) -> Label:
        """Return (role, stage) of a span. For a tool, the stage includes the name of the tool."""
        name = _tool_name(span) if (span.role, span.stage) in self._named else None
        return span.role, title(span.stage, name)

    def parts(self, label: Label) -> tuple[str, str | None]:
        """Return (stage, name of the tool) of a label. The name is None if the label names no tool."""
        return self._parts.get(label, (label[1], None))


def title(stage: str, name: str | None) -> str:
    """Return a stage with the name of its tool, such as `tool search`; the stage alone if `name` is None."""
    return stage if name is None else f"{stage} {name}"


def _tool_name(span: Span) -> str | None:
    """Return the name of the tool that a span calls, or None if the span is no tool call or has no name."""
    value = (span.attrs or {}).get("name")
    if not isinstance(value, str) or not is_tool(span.role, span.stage):
        return None
    return " ".join(value.split())[:_LENGTH] or None
