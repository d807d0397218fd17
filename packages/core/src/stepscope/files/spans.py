"""Span records of `spans/*.jsonl`: one JSON object a line, distinguished by the field `kind`.

A file has one `header`, then `open` and `span` lines in any order, then one `end`. A span that was still
running at the last flush has only an `open` line. If a process did not close its capture, its file has no
`end`. Times are CLOCK_MONOTONIC of the writing process in ns. The anchors in `header` and `end` convert them
to wall-clock time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.values import AttrValue

CONSUME = "consume"
"""Stage of a span of zero length, which records that this step trains on the span's trajectory. Its
attributes `begun` and `begun_version` are the step and the policy version in which the trajectory began."""

STEP_TOKENS = "step_tokens"
"""Stage of a span of zero length. Its attributes `rollout` and `train` are the numbers of tokens that this
process counted in the step."""

WAIT = "wait"
"""Attribute of a span: `true` if the span only waits, `false` if it works although its stage is named as a
wait."""
WAITING = frozenset({"queue", "wait"})
"""Stages that count as waits without the attribute `wait`. Stages that begin with `wait_` count too."""
GROUP, SEQUENCE = "group", "sequence"
"""Attributes of a collective's span: the name of its process group, and its number in the group, which is the
same in all ranks."""
BEGIN_ONLY = "begin_only"
"""Attribute of a collective's span of zero length: `true`, because only its begin is known."""
ISSUED_NS = "issued_ns"
"""Attribute of a span that waits for a collective: the time from the issue of the collective to the wait."""
REPLICA = "replica"
"""Attribute of a span that is work of an inference replica: the number of the replica."""
SERVED = frozenset({"prefill", "decode"})
"""Stages in which a replica computes a request."""

MOST_NAMES = 50
"""Largest number of a step's stages, and of its roles, that are shown one by one. The longest are shown."""
OTHER_NAMES = "(other names)"
"""Name of the stage or role that combines all stages or roles beyond `MOST_NAMES`."""

PROFILING = "stepscope profiler"
"""Stage of a span in which a profiler started or stopped a stage's window (discrete mode). Its attribute
`window` names that stage."""


def only_waits(stage: str, attrs: Mapping[str, AttrValue] | None) -> bool:
    """Return whether a span only waits, by its attribute `wait`, else by the name of its stage."""
    said = None if attrs is None else attrs.get(WAIT)
    return said if isinstance(said, bool) else stage in WAITING or stage.startswith("wait_")


class SpanLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A span in another process or another step."""

    process: str
    """`ProcessInfo.key` of the span's process."""
    span: Int
    """Number of the span in the file of its process."""
    step: Int | None = None
    """The captured step whose files contain the span, or None for the step of the file with the link."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    format: Int = 1
    step: Int
    run_id: str
    process: ProcessInfo
    anchor: ClockAnchor


class Open(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="open", tag_field="kind"):
    """A span that was still running at a flush, written so that a hang is visible.

    The fields are not keyword-only, because 16 keyword arguments would cost more than everything else in a
    line.
    """

    span: Int
    """The span's number, unique in its process. A span that runs in several steps has the same number in the
    files of all these steps."""
    role: str
    stage: str
    start_ns: int
    parent: Int | None = None
    link: SpanLink | None = None
    traceparent: str | None = None
    """The parent span in another tracer, or None if `parent` or `link` states the parent."""
    step: Int | None = None
    policy_version: Int | None = None
    trajectory: str | None = None
    turn: Int | None = None
    thread: Int = 0
    """Native thread id, as in kernel-level traces."""
    attrs: dict[str, AttrValue] | None = None


class Span(Open, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="span", tag_field="kind"):
    """A finished span. `step` is None if the span belongs to the step of the file."""

    dur_ns: int
    error: str | None = None
    """`ExceptionType: message` of the exception that left the span, or None. The text is cut at 200
    characters, or at 2000 for an error of stepscope."""
    cancelled: bool = False
    """True if the span's work was cancelled, which is not an error."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    anchor: ClockAnchor
    spans: Int
    dropped: Int
    """Number of spans that were not recorded, because the budget or the disk was full."""


Line: TypeAlias = Header | Open | Span | End
