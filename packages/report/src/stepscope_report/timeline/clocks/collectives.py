"""Collectives in the traces of torch: the times at which a process entered and left each of them.

Only collectives count that no rank leaves before all have entered. Broadcasts do not count, because their
root may leave at once. On GPUs, the kernels of NCCL and RCCL are read. Their arguments name the group, the
kind and, in newer torch, a number. The events of gloo name no group.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from stepscope_report.timeline.readers.blocks import read_blocks
from stepscope_report.timeline.readers.chrome import ChromeTrace, Distributed
from stepscope_report.timeline.readers.contract import Notes
from stepscope_report.timeline.readers.json_array import TOKEN

MOST = 1 << 18
"""Largest number of collectives that are read of one process."""
_KEPT = 4096
"""Largest number of collectives of one kind that are kept of one process. If there are more, every second,
fourth, ... run of `_RUN` collectives is kept."""
_RUN = 64
_GLOO = b'"gloo:'
_NCCL = b'"Collective name"'
_LONGEST = 1 << 20
"""Largest size in bytes of an event that can be a collective."""
_NAMED = re.compile(rb'"name":\s*\Z')
_KERNEL = re.compile(rb'"cat":\s*"kernel"')
_ALL_WAIT = frozenset(
    (
        "gloo:all_reduce", "gloo:sparse_all_reduce", "gloo:all_gather", "gloo:barrier", "gloo:reduce_scatter",
        "allreduce", "allreduce_coalesced", "barrier", "all_barrier", "allgather", "_allgather_base",
        "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
    )
)  # fmt: skip
_WIDTHS = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element, by the names of c10::ScalarType."""
_SAME_SIZE = frozenset(
    ("gloo:all_reduce", "allreduce", "allreduce_coalesced", "_allgather_base", "_reduce_scatter_base")
)
"""Collectives in which the parts of all ranks have the same size."""


class Kind(NamedTuple):
    """Collectives of one kind in one process group, which run in the same order on all ranks."""

    world: str
    """World of the group: every torch world has a group called "0"."""
    group: str
    """Name and ranks of the group as in the traces, or empty if the traces do not name it."""
    op: str


class Times(NamedTuple):
    """Times of one collective on one host, in unix ns of the host's wall clock."""

    entered_ns: int
    """Time at which the last of the host's ranks entered."""
    left_ns: int
    """Time at which the first of the host's ranks left."""
    size: int
    """Hash of the size, equal for equal sizes; 0 if unknown."""


class Series(msgspec.Struct):
    """The collectives of one kind on one host."""

    numbered: bool
    """True if the keys of `times` are torch's numbers, so that partial series match. False if they
    count the collectives in order."""
    count: int
    times: dict[int, Times]


class Refused(NamedTuple):
    """Reason why the collectives of a kind cannot be matched."""

    why: str


_UNNAMED = Refused("they do not say of which process group they are, and there is not just one")


Collectives: TypeAlias = list[tuple[Kind, Series | Refused]]
"""The collectives of one process by kind, as a digest holds them."""


class _Group(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...] = ()


class _Arguments(msgspec.Struct, frozen=True):
    op: msgspec.Raw = msgspec.field(name="Collective name", default=msgspec.Raw())
    group: msgspec.Raw = msgspec.field(name="Process Group Name", default=msgspec.Raw())
    ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    received: msgspec.Raw = msgspec.field(name="Out msg nelems", default=msgspec.Raw())
    members: msgspec.Raw = msgspec.field(name="Group size", default=msgspec.Raw())
    dtype: msgspec.Raw = msgspec.Raw()
    elements: msgspec.Raw = msgspec.field(name="In msg nelems", default=msgspec.Raw())
    shape: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    number: msgspec.Raw = msgspec.field(name="Seq", default=msgspec.Raw())


class _Event(msgspec.Struct, frozen=True):
    name: str
    ts: float
    dur: float
    args: _Arguments = _Arguments()


_decode = msgspec.json.Decoder(_Event, strict=False).decode
_groups = msgspec.json.Decoder(list[_Group]).decode


def read_collectives(world: str, traces: Sequence[Path]) -> dict[Kind, Series | Refused]:
    """Return {kind: collectives of this kind} in all traces of one process of `world`.

    A kind whose collectives cannot be matched has the reason instead.
    """
    kinds: dict[Kind, _Recorded] = {}
    count = 0
    for path in traces:
        fields = ChromeTrace(path).fields()
        if fields.base_ns is None:
            continue
        alone = _only_group(fields.distributed)
        for event in _events(path, _needles(fields.distributed)):
            kind = _kind(event, world, alone)
            if kind is not None:
                kinds.setdefault(kind, _Recorded()).add(event, fields.base_ns, sized=kind.op in _SAME_SIZE)
                count += 1
            if count == MOST:
                return dict.fromkeys(kinds, Refused(f"more than {MOST:,} in one process"))
    return {kind: recorded.series() if kind.group else _UNNAMED for kind, recorded in kinds.items()}


class Call(NamedTuple):
    """One call of a collective on a device. Its times are those of the trace."""

    op: str
    group: str
    start_us: float
    dur_us: float
    number: int
    """Number that torch gave the call, or -1 if it gave none."""
    waits: bool
    """True if no rank leaves the collective before all have entered."""
    ranks: int
    """Number of ranks of the group, or 0 if the trace does not state it."""
    bytes: int
    """Size in bytes as nccl-tests counts it, or 0 if the trace does not state it."""


def calls_in(events: bytes) -> Iterator[Call]:
    """Yield the calls of NCCL and RCCL in `events`, JSON text of complete trace events."""
    for at, needle in _hits(events, (_NCCL,)):
        start = _start(events, at, needle)
        end = None if start < 0 else _end(events, start)
        event = None if end is None else _decoded(events[start:end])
        if event is not None:
            op, args = _text(event.args.op), event.args
            group = f"{_text(args.group)} {_text(args.ranks)}"
            ranks = _integer(args.members)
            yield Call(op, group, event.ts, event.dur, _number(event), op in _ALL_WAIT, ranks, _bytes(args))


def _bytes(args: _Arguments) -> int:
    """Return the bytes of a collective: what a rank receives in a gather, else what it contributes."""
    gathers = "gather" in _text(args.op)
    return _integer(args.received if gathers else args.elements) * _WIDTHS.get(_text(args.dtype), 0)


def _integer(raw: msgspec.Raw) -> int:
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < 19 else 0


def join(kind: Kind, ranks: Iterable[Mapping[Kind, Series | Refused]]) -> Series | Refused:
    """Join the collectives of several processes of one host."""
    joined: Series | Refused | None = None
    for rank in ranks:
        series = rank.get(kind)
        if series is not None:
            joined = series if joined is None else _both(joined, series)
    return Refused("there are none") if joined is None else joined


def match(
    one: Series | Refused, other: Series | Refused, shift: int = 0
) -> dict[int, tuple[Times, Times]] | str:
    """Return {key in `one.times`: times of the collective on both sides}.

    Return the reason instead if the collectives cannot be matched.

    Args:
        shift: Positions by which the other series is moved, as if its first collectives were missing.
    """
    if isinstance(one, Refused):
        return one.why
    if isinstance(other, Refused):
        return other.why
    if one.numbered != other.numbered:
        return "only one side's are numbered"
    if not one.numbered and one.count != other.count:
        return f"{one.count} against {other.count}, and nothing numbers them"
    pairs = {
        key: (times, other.times[key + shift])
        for key, times in one.times.items()
        if key + shift in other.times
    }
    if any(a.size and b.size and a.size != b.size for a, b in pairs.values()):
        return "sizes differ, so that they are not the same ones"
    return pairs or "none is on both sides"


class _Recorded:
    """Collectives of one kind in one process, in the order of the file."""

    def __init__(self) -> None:
        self._entered, self._left, self._sizes, self._numbers = (array("q") for _ in range(4))

    def add(self, event: _Event, base_ns: int, *, sized: bool) -> None:
        entered_ns = base_ns + round(event.ts * 1000)
        self._entered.append(entered_ns)
        self._left.append(entered_ns + round(event.dur * 1000))
        size = bytes(event.args.elements or event.args.shape) if sized else b""
        self._sizes.append(crc32(size) + 1 if size else 0)
        self._numbers.append(_number(event))

    def series(self) -> Series:
        order = sorted(range(len(self._entered)), key=self._entered.__getitem__)
        numbered = min(self._numbers) >= 0
        keys = [self._numbers[at] for at in order] if numbered else list(range(len(order)))
        every = 1
        while len(order) > every * _KEPT:
            every *= 2
        unsure = set() if numbered else self._overlapping(order)
        often = Counter(keys)
        times = {
            key: Times(self._entered[at], self._left[at], self._sizes[at])
            for place, (key, at) in enumerate(zip(keys, order, strict=True))
            if key // _RUN % every == 0 and place not in unsure and often[key] == 1
        }
        return Series(numbered, len(order), times)

    def _overlapping(self, order: Sequence[int]) -> set[int]:
        """Return the indices of collectives that overlap. Another rank may have run these in another
        order.
        """
        places: set[int] = set()
        latest = -1
        for place in range(1, len(order)):
            before = order[place - 1]
            if latest < 0 or self._left[before] >= self._left[order[latest]]:
                latest = place - 1
            if self._entered[order[place]] < self._left[order[latest]]:
                places |= {latest, place}
        return places


def _both(one: Series | Refused, other: Series | Refused) -> Series | Refused:
    if isinstance(one, Refused) or isinstance(other, Refused):
        return one if isinstance(one, Refused) else other
    pairs = match(one, other)
    if isinstance(pairs, str):
        return Refused(pairs)
    times = {
        key: Times(max(a.entered_ns, b.entered_ns), min(a.left_ns, b.left_ns), a.size or b.size)
        for key, (a, b) in pairs.items()
    }
    return Series(one.numbered, one.count, times)


def _needles(distributed: Distributed | None) -> tuple[bytes, ...]:
    """Return the patterns to search for: gloo's events only if gloo is used, since they name no group."""
    return (_GLOO, _NCCL) if distributed is not None and b"gloo" in bytes(distributed.pg_config) else (_NCCL,)


def _only_group(distributed: Distributed | None) -> str:
    """Return the ranks of the only process group with several ranks, or "" if there is not exactly one."""
    try:
        groups = {group.ranks for group in ([] if distributed is None else _groups(distributed.pg_config))}
    except msgspec.DecodeError:
        return ""
    several = [ranks for ranks in groups if len(ranks) != 1]
    return str(list(several[0])) if len(several) == 1 else ""


def _kind(event: _Event, world: str, alone: str) -> Kind | None:
    """Return the `Kind` of an event. Return None for events that are no collectives, and for collectives that
    a rank may leave before all ranks have entered.
    """
    if event.name.startswith("gloo:"):
        return Kind(world, alone, event.name) if event.name in _ALL_WAIT else None
    op = _text(event.args.op)
    group = f"{_text(event.args.group)} {_text(event.args.ranks)}"
    return Kind(world, group, op) if op in _ALL_WAIT else None


def _number(event: _Event) -> int:
    number = bytes(event.args.number)
    return int(number) if number.isdigit() and len(number) < 19 else -1


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode(errors="replace").strip('"')


def _events(path: Path, needles: Sequence[bytes]) -> Iterator[_Event]:
    """Yield the events that contain one of the needles. Other events are not parsed."""
    text = b""
    for block in read_blocks(path, Notes()):
        text += block
        done = 0
        for at, needle in _hits(text, needles):
            start = _start(text, at, needle)
            if start < done:
                continue
            end = _end(text, start)
            if end is None:
                break
            done = end
            event = _decoded(text[start:end])
            if event is not None:
                yield event
        else:
            # An event that continues in the next block began at the last brace, or at the brace before.
            start = max(done, text.rfind(b"{", 0, max(0, text.rfind(b"{"))))
        text = text[start:] if len(text) - start < _LONGEST else b""


@cache
def _finder() -> Callable[[bytes, bytes], int]:
    """Return StringZilla's `find` if installed, else Python's, which takes four times as long."""
    try:
        finder: Callable[[bytes, bytes], int] = import_module("stringzilla").find
    except ImportError:
        return bytes.find
    return finder


def find(text: bytes, needle: bytes) -> int:
    """Return the first offset of some bytes in a text, or -1 if the text does not contain them."""
    return _finder()(text, needle)


def _hits(text: bytes, needles: Sequence[bytes]) -> list[tuple[int, bytes]]:
    hits = []
    for needle in needles:
        at = find(text, needle)
        while at >= 0:
            hits.append((at, needle))
            at = text.find(needle, at + 1)
    return sorted(hits)


def _start(text: bytes, at: int, needle: bytes) -> int:
    """Return the offset of the event whose name or argument is at `at`, or -1 if there is none."""
    brace = text.rfind(b"{", 0, at)
    if needle == _GLOO:
        return brace if _NAMED.search(text[max(brace, at - 32) : at]) else -1
    start = text.rfind(b"{", 0, max(0, brace))
    return start if start >= 0 and _KERNEL.search(text[start:brace]) else -1


def _end(text: bytes, start: int) -> int | None:
    """Return the end of the object that begins at `start`, or None if it does not end in `text`."""
    depth = 0
    for token in TOKEN.finditer(text, start, start + _LONGEST):
        mark = text[token.start()]
        depth += (mark in b"{[") - (mark in b"}]")
        if depth == 0:
            return token.end()
    return None


def _decoded(text: bytes) -> _Event | None:
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
