"""Events of a torch trace, decoded from JSON into typed records.

Typed decoding is fast because it takes only the fields of `Facts` from `args`, and shapes if the trace has
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec

from stepscope_report.timeline.activity.nesting import NONE

FARTHEST_US = 4e15
"""Largest plausible time or duration: the year 2096, for traces that count from 1970."""
_Us: TypeAlias = Annotated[float, msgspec.Meta(ge=-FARTHEST_US, le=FARTHEST_US)]


class Complete(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    """A slice (phase X) of a Chrome trace. For the work of a device, `pid` is the device's number."""

    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Us = 0.0
    dur: _Us = 0.0


ASYNC, MEMORY, METADATA = "\0", "\1", "\2"
"""Categories of asynchronous events, memory events and metadata; no slice has them."""


class Begin(msgspec.Struct, tag_field="ph", tag="b", gc=False):
    cat: ClassVar[str] = ASYNC
    name: str = ""
    kind: str = msgspec.field(default="", name="cat")
    id: int | str = 0
    pid: int | str = 0
    ts: float = 0.0


class End(msgspec.Struct, tag_field="ph", tag="e", gc=False):
    cat: ClassVar[str] = ASYNC
    kind: str = msgspec.field(default="", name="cat")
    id: int | str = 0
    pid: int | str = 0
    ts: float = 0.0


_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=10**15)]


class Facts(msgspec.Struct, gc=False):
    """Fields of an event's `args` about a device's work, a call into its runtime, and the links that `Links`
    checks. A number that is not stated is -1, except `node`, which is 0.
    """

    device: _Id = -1
    correlation: _Id = -1
    node: _Id = msgspec.field(default=0, name="graph node id")
    sequence: _Id = msgspec.field(default=-1, name="Sequence number")
    thread: _Id = msgspec.field(default=-1, name="Fwd thread id")
    record: _Id = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    sync: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="cuda_sync_kind")
    op: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Collective name")
    dtype: msgspec.Raw = msgspec.Raw()
    sent: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="In msg nelems")
    received: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Out msg nelems")
    members: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Group size")


class _Stated(Complete, tag_field="ph", tag="X", gc=False):
    args: Facts | None = None


class _Args(Facts, gc=False):
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(NONE), name="Input Dims")


class Shaped(Complete, tag_field="ph", tag="X", gc=False):
    args: _Args | None = None


class _Odd(Complete, tag_field="ph", tag="X", gc=False):
    """A slice with an argument of an unexpected type."""

    args: msgspec.Raw = msgspec.Raw()


class Linked(Complete, tag_field="ph", tag="X", gc=False):
    """A slice from another reader. A kernel and its launch have the same `correlation`."""

    correlation: int = -1


def facts_of(event: Complete) -> Facts:
    if isinstance(event, (_Stated, Shaped)):
        return event.args or _NOTHING_SAID
    if isinstance(event, Linked):
        return Facts(correlation=event.correlation)
    return _readable(event.args) if isinstance(event, _Odd) else _NOTHING_SAID


def all_facts(events: Sequence[Any]) -> list[Facts]:
    """Return the facts of events. Events of the usual type are handled without a call of `facts_of`, which is
    four times as fast.
    """
    return [event.args or _NOTHING_SAID if type(event) is _Stated else facts_of(event) for event in events]


def _readable(args: msgspec.Raw) -> Facts:
    """Return the facts in the arguments, without arguments of a wrong type."""
    facts = Facts()
    with suppress(msgspec.DecodeError):
        for name, raw in _raw_fields(args).items():
            with suppress(msgspec.DecodeError, KeyError):
                field = _FIELDS[name]
                setattr(facts, field, getattr(_decode_facts(b'{"%b":%b}' % (name.encode(), raw)), field))
    return facts


_NOTHING_SAID = Facts()
_FIELDS = {field.encode_name: field.name for field in msgspec.structs.fields(Facts)}
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_facts = msgspec.json.Decoder(Facts).decode


class MemoryArgs(msgspec.Struct, gc=False):
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")
    kind: int | None = msgspec.field(default=None, name="Device Type")
    device: int | None = msgspec.field(default=None, name="Device Id")


class Instant(msgspec.Struct, tag_field="ph", tag="i", gc=False):
    cat: ClassVar[str] = MEMORY
    name: str = ""
    ts: _Us = 0.0
    args: MemoryArgs | None = None


class Metadata(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    """A description of a process or thread (phase M). The fields are JSON."""

    cat: ClassVar[str] = METADATA
    name: msgspec.Raw = msgspec.Raw()
    pid: msgspec.Raw = msgspec.Raw()
    tid: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


class ProcessLabels(msgspec.Struct, gc=False):
    labels: str


class _Unread(msgspec.Struct, gc=False):
    """An event of a phase that is not used."""

    cat: ClassVar[str] = ""


def _nothing(phase: str) -> type[msgspec.Struct]:
    return msgspec.defstruct(f"_Skipped_{phase}", [], bases=(_Unread,), tag_field="ph", tag=phase, gc=False)


Event: TypeAlias = Complete | Instant | Begin | End | Metadata
_unused = [_nothing(phase) for phase in "stfCBEnNODSTpFPIRcvVa(),"]


def _events(slices: type[Complete]) -> Any:
    """Return a decoder of events. Events of unused phases are decoded to structs without fields. The types of
    these structs are made at run time.
    """
    event: Any = reduce(or_, _unused, slices | Instant | Begin | End | Metadata)
    return msgspec.json.Decoder(list[event], strict=False).decode


decode_events, decode_with_shapes, _decode_odd = _events(_Stated), _events(Shaped), _events(_Odd)


def decode_element(element: msgspec.Raw) -> list[Event]:
    """Return [event] for an element of the array, or an empty list if the element is no event."""
    for decode in (decode_with_shapes, _decode_odd):
        with suppress(msgspec.ValidationError):
            events: list[Event] = decode(b"[%b]" % element)
            return events
    return []


def has_shapes(events: Sequence[Event]) -> bool:
    """Return whether operators may have shapes. All slices of a sound block have one type."""
    slices = (event for event in events if isinstance(event, Complete))
    return isinstance(next(slices, None), (Shaped, _Odd))
