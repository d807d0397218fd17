"""Spans of collectives: calls of torch's process groups by Python code, and waits for these calls.

Methods of `ProcessGroup` and `Work` are replaced. Functions of `torch.distributed` are not, because programs
import them by name and torch.compile recognises them by identity. So collectives of FSDP are recorded too,
and collectives in compiled code are not.

If the calling thread waits at once, the span lasts from the call to the end of the wait. For a call with
`async_op=True`, the span is only the wait, and its attribute `issued_ns` is the time from the call to the
wait. If no code waits, the span is only the call. With NCCL, a wait returns once the device's stream waits,
so the times are times of the host.

Collectives that C++ code issues, such as the buckets of DDP, come from torch's flight recorder of gloo. Newer
versions of torch note the start of each call of gloo (`TORCH_FR_BUFFER_SIZE`, 2,000 calls by default), but
not its end. So these spans have zero length. A report compares the starts in all ranks to find the ranks that
waited. Reading 2,000 calls takes 40 ms of CPU, so calls are only read for steps that are written. Calls of
NCCL are left out, because the host issues them long before the device runs them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from stepscope._recording.process import failures, fork
from stepscope._recording.process.failures import outcome_of
from stepscope._recording.spans import slot
from stepscope._recording.spans.compiled import uncompiled
from stepscope._recording.spans.maker import SpanMaker
from stepscope._recording.spans.scopes import Scope, current
from stepscope._recording.spans.span import Span, next_id, thread
from stepscope.errors import ours
from stepscope.files import clock
from stepscope.files.spans import BEGIN_ONLY, GROUP, ISSUED_NS, SEQUENCE, WAIT
from stepscope.files.values import AttrValue

if TYPE_CHECKING:
    from stepscope.files.values import AttrValue

_STAGES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
}
"""{method of `ProcessGroup`: stage of its spans}. Each version of torch has some of these methods."""
_AT_ONCE_NS = 50_000
"""If a wait begins within this time after a call on the same thread, the call and the wait are one span."""

_Method: TypeAlias = Callable[..., Any]

_is_on = False
"""True if collectives are recorded. One writer: `watch`."""
_installed = False
"""True if the methods of `ProcessGroup` and `Work` have been replaced. One writer: `watch`."""
_issued: dict[int, _Issued] = {}
"""{id of a `Work`: the call}, for calls that no code has waited for. `sweep` removes entries whose `Work` was
freed."""
seen: deque[tuple[str, int, int]] = deque(maxlen=4096)
"""(process group, number, monotonic start in ns) of the last calls by Python code. The limit is above the
number of calls in torch's own recorder. One writer: `_note`."""
_SWEEP_AT = 256
"""Number of entries in `_issued` above which each further call runs `sweep`."""


class _Issued(weakref.ref[Any]):
    """Facts about a call, and a weak reference to the `Work` that the call has returned.

    A weak reference lets the tensors of the `Work` be freed as early as without stepscope. It has no
    callback, because Python would ignore an exception that a signal handler raises in a callback.
    """

    __slots__ = ("attrs", "end_ns", "parent", "stage", "start_ns", "thread")

    attrs: dict[str, AttrValue]
    end_ns: int
    parent: Scope | None
    stage: str
    start_ns: int
    thread: int


def watch(is_on: bool) -> None:
    """Begin or stop recording collectives. Before torch.distributed is initialised this has no effect, so
    call it again later.
    """
    global _is_on, _installed
    if _issued:
        sweep()
    _is_on = is_on
    if not is_on or _installed:
        return
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return
        _installed = True
        for name, stage in _STAGES.items():
            if hasattr(c10d.ProcessGroup, name):
                setattr(c10d.ProcessGroup, name, _timed(getattr(c10d.ProcessGroup, name), name, stage))
        c10d.Work.wait = _waited(c10d.Work.wait)
    except ours() as error:
        failures.note("timing collectives", error)


def is_on() -> bool:
    """Return whether collectives are timed."""
    return _is_on and _installed


def _timed(method: _Method, name: str, stage: str) -> _Method:
    @uncompiled
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if slot.active is None or not _is_on:
            return method(group, *args, **kwargs)
        start_ns = monotonic_ns()
        work = method(group, *args, **kwargs)
        _note(group, stage, work, start_ns)
        return work

    call.__name__, call.__doc__ = name, method.__doc__
    return call


@uncompiled
def _note(group: Any, stage: str, work: Any, start_ns: int) -> None:
    """Store a call until code waits for its `Work` or drops it. A call without a `Work` is complete, and is
    recorded now.
    """
    end_ns = monotonic_ns()
    try:
        name, number = group.group_name, group._get_sequence_number_for_group()
        seen.append((name, number, start_ns))
        attrs: dict[str, AttrValue] = {WAIT: True, GROUP: name, SEQUENCE: number}
        if work is None:
            _begin(stage, attrs, start_ns, end_ns)
            return
        if len(_issued) >= _SWEEP_AT or id(work) in _issued:  # the id was reused, so its Work was freed
            sweep()
        issued = _Issued(work)
        issued.stage, issued.attrs, issued.start_ns, issued.end_ns = stage, attrs, start_ns, end_ns
        issued.thread, issued.parent = thread.id, current.get()
        _issued[id(work)] = issued
    except ours() as error:
        failures.note(f"timing the collective {stage}", error)


def _waited(method: _Method) -> _Method:
    @uncompiled
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        issued = _issued.pop(id(work), None)
        span = None if issued is None else _wait_of(issued)
        if span is None:
            return method(work, *args, **kwargs)
        try:
            return method(work, *args, **kwargs)
        except BaseException as error:
            span.error = outcome_of(error)
            raise
        finally:
            span.end_ns = monotonic_ns()

    wait.__doc__ = method.__doc__
    return wait


@uncompiled
def _wait_of(issued: _Issued) -> Span | None:
    """Begin the span of a wait and return it, or None if recording is off."""
    try:
        now_ns = monotonic_ns()
        if issued.thread == thread.id and now_ns - issued.end_ns <= _AT_ONCE_NS:
            return _begin(issued.stage, issued.attrs, issued.start_ns, None)
        attrs = {**issued.attrs, ISSUED_NS: now_ns - issued.start_ns}
        return _begin(issued.stage, attrs, now_ns, None)
    except ours() as error:
        failures.note(f"timing the wait for {issued.stage}", error)
        return None


@uncompiled
def sweep() -> None:
    """Record the calls whose `Work` was freed without a wait."""
    for key, issued in [(key, issued) for key, issued in _issued.copy().items() if issued() is None]:
        if _issued.pop(key, None) is None:
            continue  # another thread records it
        try:
            attrs = {name: value for name, value in issued.attrs.items() if name != WAIT}
            _begin(issued.stage, attrs, issued.start_ns, issued.end_ns, issued)
        except ours() as error:
            failures.note(f"timing the collective {issued.stage}", error)


def _begin(
    stage: str, attrs: dict[str, AttrValue], start_ns: int, end_ns: int | None, at: _Issued | None = None
) -> Span | None:
    """Record a span with the thread and the parent of `at`, by default of the calling code. Return the span,
    or None if recording is off.
    """
    active = slot.active
    if active is None:
        return None
    log: Any = active.log
    thread_id, parent = (thread.id, current.get()) if at is None else (at.thread, at.parent)
    span = Span(log, stage, None, attrs, parent=parent, thread=thread_id, id=next_id())
    span.start_ns, span.end_ns = start_ns, end_ns
    log.opened(span)
    return span


_GLOO = "gloo:"
_BEFORE_NS = 100_000_000
"""Longest time from the start of a call in Python to the time of the call in torch's recorder."""

_numbers: dict[str, int] = {}
"""{process group: number of its last call when the capture began}. One writer: `begin_issued`."""


class _Call(msgspec.Struct):
    """One call in a dump of torch's flight recorder (`FlightRecorder.hpp`)."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    time_created_ns: int
    thread_id: str = ""
    is_p2p: bool = False

    @property
    def group(self) -> str:
        """Name of the process group."""
        return self.process_group[0]


class _Dump(msgspec.Struct):
    entries: list[_Call] = []


def begin_issued() -> None:
    """Remember the number of the last call of each process group."""
    _numbers.clear()
    try:
        _numbers.update(_last_numbers())
    except ours() as error:
        failures.note("counting collectives", error)


def record_issued(log: SpanMaker, since_ns: int) -> None:
    """Add to a log the calls that C++ issued after `since_ns` (monotonic). Torch's recorder is read only if
    C++ seems to have issued calls.
    """
    try:
        if _has_unseen(since_ns):
            for span in issued(log, since_ns):
                log.opened(span)
    except ours() as error:
        failures.note("reading the collectives that C++ issued", error)


def issued(log: SpanMaker, since_ns: int) -> list[Span]:
    """Return the calls that C++ issued after `since_ns` (monotonic), as new spans. The spans take their ids
    from `log`, and are not added to it.

    Raises:
        Exception: torch's recorder has another format.
    """
    dump: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if dump is None or not is_on():
        return []
    now = clock.read_anchor()
    text = dump(includeCollectives=True, onlyActive=False)
    calls = msgspec.json.decode(text, type=_Dump, strict=False).entries
    starts_ns = [call.time_created_ns - now.wall_ns + now.mono_ns for call in calls]
    noted, spans = _noted(calls, starts_ns), list[Span]()
    threads = {str(thread.ident): fork.native_id_of(thread) for thread in threading.enumerate()}
    for at, (call, start_ns) in enumerate(zip(calls, starts_ns, strict=True)):
        is_own = call.profiling_name.startswith(_GLOO) and not call.is_p2p and at not in noted
        if not is_own or start_ns < since_ns:
            continue
        stage = call.profiling_name[len(_GLOO) :]
        attrs: dict[str, AttrValue] = {BEGIN_ONLY: True, GROUP: call.group, SEQUENCE: call.collective_seq_id}
        span = Span(log, stage, None, attrs, thread=threads.get(call.thread_id, 0), id=next_id())
        span.start_ns = span.end_ns = start_ns
        spans.append(span)
    return spans


def _noted(calls: Sequence[_Call], starts_ns: Sequence[int]) -> set[int]:
    """Return the indices of the calls that Python code issued.

    A group that was destroyed and made again has the name and the numbers of the old group. So a call in
    `seen` is matched with the call of this name and number that is nearest in time.
    """
    alike = defaultdict[tuple[str, int], list[int]](list)
    for at, call in enumerate(calls):
        alike[call.group, call.collective_seq_id].append(at)
    noted = set[int]()
    for name, number, at_ns in list(seen):
        after_ns = {at: abs(starts_ns[at] - at_ns) for at in alike.get((name, number), ())}
        noted |= {at for at, ns in after_ns.items() if ns == min(after_ns.values()) and ns < _BEFORE_NS}
    return noted


def _has_unseen(since_ns: int) -> bool:
    """Return whether C++ code has issued calls: a process group has had more calls since `begin_issued` than
    Python code has issued since `since_ns`.
    """
    if not is_on():
        return False
    by_python = Counter(name for name, _, at_ns in list(seen) if at_ns >= since_ns)
    return any(last - _numbers.get(group, 0) > by_python[group] for group, last in _last_numbers().items())


def _last_numbers() -> dict[str, int]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    return {str(name): _last_number(group) for group, name in c10d._world.pg_names.items()}


def _last_number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except ours(RuntimeError):  # older versions of gloo raise before the first call
        return 0
