"""Span records of `spans/*.jsonl`: one JSON object a line, distinguished by the field `kind`.

A file is: one `header`, then `open` and `span` lines in any order, then one `end`. A span that was still
running when the file was last flushed has only its `open` line; a file without `end` belongs to a process
that did not close its capture. Times are CLOCK_MONOTONIC ns of the writing process; the header's and end's
anchors turn them into wall-clock time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.values import AttrValue

CONSUME = "consume"
"""Stage of a span without length that says that this step trains on the trajectory that the span names. The
attributes `begun` and `begun_version` hold the step and the policy version in which the trajectory began."""

STEP_TOKENS = "step_tokens"
"""The stage of a span without length. Its attributes `rollout` and `train` count tokens of the step, in this
process.
"""

WAIT = "wait"
"""Attribute of a span that only waits: `true`; `false` if the span works although its name says `wait`."""
WAITING = frozenset({"queue", "wait"})
"""Stages that wait even without that attribute, as do those whose names begin with `wait_`."""
GROUP, SEQUENCE = "group", "sequence"
"""Attributes of a collective's span: the name of its process group, and its number in that group, the
same in all ranks."""
ISSUED_NS = "issued_ns"
"""Attribute of the span of a wait: the time since the collective that it waits for was issued."""
REPLICA = "replica"
"""The attribute of a span that is work of an inference replica: its number among those of its role."""
SERVED = frozenset({"prefill", "decode"})
"""Stages in which a replica works on a request."""

MOST_NAMES = 50
"""Number of a step's stages, the longest ones, that have their own row; also the number of its roles."""
OTHER_NAMES = "(other names)"
"""Name of the stage, or role, that combines all others."""

PROFILING = "stepscope profiler"
"""The stage of a span in which a profiler started or stopped inside the step (stage windows in discrete
mode). Its attribute `window` names the stage.
"""


def only_waits(stage: str, attrs: Mapping[str, AttrValue] | None) -> bool:
    """Return whether a span only waits, by its attribute, else by the name of its stage."""
    said = None if attrs is None else attrs.get(WAIT)
    return said if isinstance(said, bool) else stage in WAITING or stage.startswith("wait_")


class SpanLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A span in another process or another step."""

    process: str
    span: Int
    step: Int | None = None


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    format: Int = 1
    step: Int
    run_id: str
    process: ProcessInfo
    anchor: ClockAnchor


class Open(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="open", tag_field="kind"):
    """A span that still runs at a flush, so that a hang is visible.

    The fields are not keyword-only: 16 keywords cost more than all else of a line.
    """

    span: Int
    role: str
    stage: str
    start_ns: int
    parent: Int | None = None
    link: SpanLink | None = None
    traceparent: str | None = None
    """The parent, as another tracer named it. None where `parent` or `link` names it."""
    step: Int | None = None
    policy_version: Int | None = None
    trajectory: str | None = None
    turn: Int | None = None
    thread: Int = 0
    """Native thread id, as in kernel-level traces."""
    attrs: dict[str, AttrValue] | None = None


class Span(Open, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="span", tag_field="kind"):
    """A finished span. `step` is None if it is the step of the file."""

    dur_ns: int
    error: str | None = None
    """`ExceptionType: message` that left the span, cut at 200 characters (stepscope's own at 2000)."""
    cancelled: bool = False
    """True if its work was cancelled, which is no error."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    anchor: ClockAnchor
    spans: Int
    dropped: Int
    """Spans that were not recorded because the budget or the disk was full. The report shows it."""


Line: TypeAlias = Header | Open | Span | End
