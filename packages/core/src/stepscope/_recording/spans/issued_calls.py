"""Collectives that C++ code issues, such as the buckets of DDP, from torch's flight recorder of gloo.

Newer versions of torch note the begin of each call of gloo (`TORCH_FR_BUFFER_SIZE`, 2,000 calls by default),
but no end. So the spans have zero length, and a report finds from the begins in all ranks who waited. Reading
2,000 calls takes 40 ms of CPU, so that only a step that is written has them. Calls of NCCL are left out: the
host issues them long before the device runs them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import msgspec

from stepscope._recording.process import failures, fork
from stepscope._recording.spans import collective_calls
from stepscope._recording.spans.maker import SpanMaker
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files import clock
from stepscope.files.spans import BEGIN_ONLY, GROUP, SEQUENCE
from stepscope.files.values import AttrValue

_GLOO = "gloo:"
_BEFORE_NS = 100_000_000
"""Longest time from the start of a call in Python to its begin in torch's recorder."""

_numbers: dict[str, int] = {}
"""{process group: number of its last call when the capture began}. One writer: `begin`."""


class _Call(msgspec.Struct):
    """One call in a dump of torch's flight recorder (`FlightRecorder.hpp`)."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    time_created_ns: int
    thread_id: str = ""
    is_p2p: bool = False


class _Dump(msgspec.Struct):
    entries: list[_Call] = []


def begin() -> None:
    """Remember the number of the last call of each process group."""
    _numbers.clear()
    try:
        _numbers.update(_last_numbers())
    except ours() as error:
        failures.note("counting collectives", error)


def record(log: SpanMaker, since_ns: int) -> None:
    """Add the calls that C++ issued after `since_ns` (monotonic) to a log, if there are any since `begin`."""
    try:
        if _has_unseen(since_ns):
            for span in issued(log, since_ns):
                log.opened(span)
    except ours() as error:
        failures.note("reading the collectives that C++ issued", error)


def issued(log: SpanMaker, since_ns: int) -> list[Span]:
    """Return the calls that C++ issued after `since_ns` (monotonic), as spans of a log that it does not have.

    Raises:
        Exception: torch's recorder has another format.
    """
    dump: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if dump is None or not collective_calls.is_on():
        return []
    now = clock.read_anchor()
    seen = {(name, number): at_ns for name, number, at_ns in list(collective_calls.seen)}
    threads = {str(thread.ident): fork.native_id_of(thread) for thread in threading.enumerate()}
    text, spans = dump(includeCollectives=True, onlyActive=False), []
    for call in msgspec.json.decode(text, type=_Dump, strict=False).entries:
        group, number = call.process_group[0], call.collective_seq_id
        start_ns = call.time_created_ns - now.wall_ns + now.mono_ns
        # A group that was made again has the name and the numbers of the old one.
        is_seen = abs(start_ns - seen.get((group, number), 0)) < _BEFORE_NS
        is_own = call.profiling_name.startswith(_GLOO) and not call.is_p2p and not is_seen
        if not is_own or start_ns < since_ns:
            continue
        stage = call.profiling_name[len(_GLOO) :]
        attrs: dict[str, AttrValue] = {BEGIN_ONLY: True, GROUP: group, SEQUENCE: number}
        span = Span(log, stage, None, attrs, thread=threads.get(call.thread_id, 0), id=next(log.ids))
        span.start_ns = span.end_ns = start_ns
        spans.append(span)
    return spans


def _has_unseen(since_ns: int) -> bool:
    """Return whether some process group has made more calls since `begin` than Python code has since
    `since_ns`.
    """
    if not collective_calls.is_on():
        return False
    seen = Counter(name for name, _, at_ns in list(collective_calls.seen) if at_ns >= since_ns)
    return any(last - _numbers.get(group, 0) > seen[group] for group, last in _last_numbers().items())


def _last_numbers() -> dict[str, int]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    return {str(name): _last_number(group) for group, name in c10d._world.pg_names.items()}


def _last_number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except ours(RuntimeError):  # gloo of older versions, before the first call
        return 0
