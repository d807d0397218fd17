"""Reader of one torch trace: its operators, kernels, devices, engine iterations and memory.

Memory holds one block of the file, and a record for each pair of name and shapes. It grows by 16 bytes with
each interval of device or operator time, and by 20 to 32 with each operator, label, function and kernel.

This file has more than 500 lines, because each type of event is counted in one place.

It reads the files that Kineto writes from torch 1.8 to 2.15, for CUDA, ROCm, XPU, MTIA and CPU.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, groupby
from operator import add, itemgetter
from pathlib import Path
from typing import Any

import msgspec

from stepscope_report.timeline.activity.content import (
    Collective,
    Device,
    GroupCalls,
    Iteration,
    Kernel,
    Operator,
    Peak,
    SizedCalls,
    Stream,
    TraceContent,
    Work,
)
from stepscope_report.timeline.activity.device_idle import (
    GC,
    DeviceKernels,
    Host,
    by_cause,
    in_steps,
    stream_number,
)
from stepscope_report.timeline.activity.device_work import DeviceWork
from stepscope_report.timeline.activity.doubts import UNSYNCED, Launches, Links
from stepscope_report.timeline.activity.event_names import is_collective, is_range, iteration_of, work_of
from stepscope_report.timeline.activity.flops import SHAPES, FlopCounter
from stepscope_report.timeline.activity.intervals import Pair, Slices, Stretches, length, unpacked
from stepscope_report.timeline.activity.nesting import (
    BESIDE,
    Nested,
    mark_key,
    mark_name,
    operator_key,
)
from stepscope_report.timeline.activity.ranges import BACKWARD, MODULE, Labels, ProfilerSteps
from stepscope_report.timeline.activity.trace_events import (
    ASYNC,
    MEMORY,
    METADATA,
    Begin,
    Complete,
    End,
    Event,
    Instant,
    Linked,
    MemoryArgs,
    Metadata,
    ProcessLabels,
    Shaped,
    all_facts,
    decode_element,
    decode_events,
    decode_with_shapes,
    facts_of,
    has_shapes,
)
from stepscope_report.timeline.clocks import FEW, MARGIN_US, NOT_NEAR, Hours, middle, wall_base
from stepscope_report.timeline.clocks.collectives import Call, calls_in, find
from stepscope_report.timeline.readers.chrome import ChromeTrace, TraceFields
from stepscope_report.timeline.readers.contract import Notes

_OPERATORS = frozenset({"cpu_op", "Operator", "operator"})
DEVICE = frozenset(
    (
        "kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events", "gpu_kernel",
        "communication",
    )
)  # fmt: skip
"""Categories of a device's work. Only readers of other formats use `communication`."""
_RUNTIME = frozenset(
    (
        "cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime", "xpu_driver",
        "privateuse1_runtime", "privateuse1_driver", "Runtime",
    )
)  # fmt: skip
_UNITS = {"xpu_runtime": "XPU", "xpu_driver": "XPU"}
"""{category of calls: name of their devices}, where Kineto labels all devices `GPU 0`, `GPU 1` and so on."""
_OF_DEVICE = re.compile(rb'"name":\s*"([A-Z]{2,} \d+) ')
"""Name of a thread, with a device in front, as `stepscope merge` writes it."""
_TO_DEVICE = re.compile(r"HtoD|H2D|Host-to-Device|HOST_TO_DEVICE", re.IGNORECASE)
"""Names of copies from the host to a device, in Kineto, ROCm and nsys."""
_NCCL_CALLS = frozenset({"COLL", "P2P"})
_SYNCS = frozenset({"cuda_sync"})
_COMMS = "record_param_comms"
_FRAMES = frozenset({"python_function"})
_ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation", "User", "python_user_annotation"})

_SIZES = 4096
"""Largest number of kept combinations of collective, group and size in one trace."""
_ALL = float("-inf"), float("inf")
ANOTHER_SHAPE = "events that are not as Kineto writes them"
OF_NO_TIME = "events of impossible duration"
_ABSOLUTE = re.compile(rb'("ts": ?1)(\d{3})(\d{12})(?!\d)')
"""A time in us since 1970. As a float, it is rounded to 0.25 us, which is coarser than `BESIDE`."""
_NEAR_ZERO = range(3_600_000_000, 996_400_000_000)
"""Last 12 digits of absolute times (in us) that are over an hour from any change of the digits in front."""
_json = msgspec.json.encode
_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode


def read_trace(
    path: Path,
    on_read: Callable[[int], None] | None = None,
    step_mark: str | None = None,
    within: Pair | None = None,
) -> TraceContent:
    """Read the trace in `path`. A missing or damaged file raises no exception, but is named in `problems`.

    Args:
        step_mark: Name of the ranges that are the program's steps, as `mark` of `ProfilerSteps`.
        within: (first, last) time in us. Only events between these times are read; None to read all.
    """
    content = _read(path, None, on_read, step_mark, within)
    near = None if is_short(content.first_us, content.last_us) else _near(path)
    return _read(path, near, None, step_mark, within) if near else content


def is_short(first_us: float | None, last_us: float | None) -> bool:
    """Return whether all events are within `MARGIN_US` of each other, so that all times are plausible."""
    return (last_us or 0.0) - (first_us or 0.0) <= MARGIN_US


def _near(path: Path) -> tuple[float, float]:
    """Return the first and the last plausible time in us in a trace."""
    hours = Hours()
    trace = ChromeTrace(path)
    trace.read(Reading(trace.notes).parse, lambda events: hours.add(starts(events)))
    return hours.near()


def starts(events: Iterable[Event]) -> Iterator[float]:
    return (event.ts for event in events if isinstance(event, Complete))


def nothing_read(why: str) -> TraceContent:
    """Return the content of a file that could not be read."""
    notes = Notes()
    notes.file(why)
    return Reading(notes).finish(TraceFields())


class Reading:
    """State of one pass over one file."""

    def __init__(
        self,
        notes: Notes,
        near: tuple[float, float] | None = None,
        step_mark: str | None = None,
        within: Pair | None = None,
    ) -> None:
        """
        Args:
            near: The first and the last plausible time in us, or None if all times are plausible.
            step_mark: The same as in `read_trace`.
            within: The same as in `read_trace`.
        """
        self._within = within
        self.notes = notes
        self.times: list[float] = []
        """Times in us of the file's first events, which show the file's clock."""
        self._cut_off: tuple[bytes, bytes] | None = None
        """(first digits of absolute times in the file, their replacement), to read and compare times exactly.
        None until a time of 16 digits, or another time, was read."""
        self.since_ns = 0
        """Unix time in ns that was subtracted from all times."""
        self._near = near or _ALL
        self.events = 0
        self.kernels: dict[str, Kernel] = {}
        self._work, self._linked = DeviceWork(), False
        self._labels_of: dict[bytes, bytes] = {}
        """{JSON of a process' id: JSON of the arguments of its `process_labels`}."""
        self._device_of: dict[tuple[bytes, bytes], str] = {}
        """{(JSON of a process' id, JSON of a thread's id): device that the thread's name states}."""
        self._unit = "GPU"
        self.sized: dict[tuple[str, str, int, int], SizedCalls] = {}
        self.collectives: dict[str, array[float]] = defaultdict(lambda: array("d"))
        """{name of a device's kernel, or of a call on the CPU such as `gloo:all_reduce`: times}. The times
        are alternating starts and ends, in arrays, because lists of floats would fragment memory."""
        self.grouped: dict[tuple[str, str], tuple[array[float], array[int]]] = defaultdict(
            lambda: (array("d"), array("q"))
        )
        self.iterations: dict[tuple[str, int | str, int | str], list[Iteration]] = defaultdict(list)
        self.peaks: dict[tuple[int, int], Peak] = {}
        self.flops = FlopCounter()
        self._launches, self._links = Launches(), Links()
        self._nested = Nested()
        self._host, self._labels = Host(self._nested), Labels()
        self._begun: dict[tuple[int | str, str, int | str], tuple[str, float]] = {}
        """{(process, category, id) of an asynchronous event that has not ended: (name, start)}."""
        self._steps = ProfilerSteps(step_mark)
        self._runtime = False
        self.first, self.last = float("inf"), float("-inf")
        self._known_frames: dict[str, int] = {}
        """{name of a Python function: its number}, without garbage collections and modules."""
        self._known: dict[str, int] = {}
        """{name of an operator without shapes: its number}."""
        self._backward: set[int] = set()
        """Numbers of the operators of torch's backward pass."""

    def parse(self, text: bytes) -> list[Event]:
        """Return the events in a JSON array, and collect the calls of NCCL and RCCL in it. Malformed events
        are counted as problems and left out.

        Raises:
            DecodeError: `text` is not JSON.
        """
        text = self._shortened(text)
        try:
            events: list[Event] = (decode_events if find(text, SHAPES) < 0 else decode_with_shapes)(text)
        except msgspec.ValidationError:
            events = []
            for element in _raw(text):
                decoded = decode_element(element)
                events += decoded
                if not decoded and bytes(element) != b"{}":  # XLA writes an empty event at the end
                    self.notes.events(ANOTHER_SHAPE)
        for call in calls_in(text):
            if not self.is_near(call.start_us, call.dur_us):
                continue
            if call.waits:
                times, numbers = self.grouped[call.op, call.group]
                times.extend((call.start_us, call.start_us + call.dur_us))
                numbers.append(call.number)
            if call.bytes and call.ranks:
                self._add_sized(call)
        return events

    def _shortened(self, text: bytes) -> bytes:
        """Return the text with `since_ns` subtracted from its times, if the first time counts from 1970."""
        if self._cut_off is None:
            first = _ABSOLUTE.search(text)
            if first is not None or self.times:  # a whole file is not searched, which takes a tenth longer
                self._cut_off = b"", b""
            if first is not None and int(first[3]) in _NEAR_ZERO:
                self._cut_off = first[1] + first[2], first[1]
                self.since_ns = (999 + int(first[2])) * 10**15
        return text.replace(*self._cut_off) if self.since_ns and self._cut_off else text

    def _add_sized(self, call: Call) -> None:
        key = call.op, call.group, call.ranks, call.bytes
        known = self.sized.get(key)
        if known is None:
            if len(self.sized) >= _SIZES:
                return
            known = self.sized[key] = SizedCalls(*key)
        known.add(call.dur_us)

    def is_near(self, start: float, dur: float) -> bool:
        inside = self._within is None or self._within[0] <= start < self._within[1]
        return inside and self._near[0] <= start and start + dur <= self._near[1]

    def _cut(self, events: Iterable[Event], within: Pair) -> Iterator[Event]:
        """Yield the events between the times `within`. An event that lies partly outside is cut to the part
        inside. A slice that lies wholly outside is only kept as a possible cause of gaps inside.
        """
        first, last = within
        for event in events:
            if isinstance(event, Complete):
                start, end = max(event.ts, first), min(event.ts + event.dur, last)
                if end - start > BESIDE or (event.dur <= BESIDE and first <= event.ts < last):
                    event.ts, event.dur = start, end - start
                    yield event
                elif event.dur >= 0 and self._near[0] <= event.ts and event.ts + event.dur <= self._near[1]:
                    self._tell_host(event)
            elif not isinstance(event, Instant) or first <= event.ts <= last:
                yield event

    def _tell_host(self, event: Complete) -> None:
        """Keep a slice outside of the times that are read, as a possible cause of gaps."""
        name, start, dur, host = event.name, event.ts, event.dur, self._host
        if event.cat in DEVICE:
            self._work.add([event], [facts_of(event)], [start], [dur], self._work.beyond)
        elif event.cat in _RUNTIME:
            caller = host.thread((event.pid, event.tid))
            host.launched([facts_of(event).correlation], [start], [caller])
            host.calls([name], [start], [dur], [caller])
        elif event.cat in _FRAMES:
            host.frame(name, start, dur, host.thread((event.pid, event.tid)))
        elif event.cat in _ANNOTATIONS and is_collective(name):
            host.collective(name, start, dur)
        elif event.cat in _ANNOTATIONS or (event.cat in _OPERATORS and is_range(name)):
            host.mark(name, start, dur)
        elif event.cat in _OPERATORS:
            thread, number = host.thread((event.pid, event.tid)), self._nested.number(name)
            self._nested.beyond[thread].add(start, dur, number)

    def take(self, events: Sequence[Event]) -> None:
        if self._within is not None:
            events = list(self._cut(events, self._within))
        self.events += len(events)
        if len(self.times) < FEW:
            self.times += starts(events)
        work: list[Complete] = []
        calls: list[Complete] = []
        frames: list[Complete] = []
        others: list[Complete] = []
        special: list[int] = []

        def put_special(event: Complete) -> None:  # `_operators` adds the event by itself
            special.append(len(others))
            others.append(event)

        put_of: Mapping[str, Callable[[Any], object]] = {
            **dict.fromkeys(DEVICE, work.append),
            **dict.fromkeys(_RUNTIME, calls.append),
            **dict.fromkeys(_FRAMES, frames.append),
            **dict.fromkeys(_OPERATORS, put_special if has_shapes(events) else others.append),
            **dict.fromkeys((*_ANNOTATIONS, *_SYNCS, "Trace"), put_special),
            ASYNC: self._asynchronous,
            MEMORY: self._instant,
            METADATA: self.describe,
        }
        put = put_of.get
        for event in events:
            put(event.cat, bool)(event)  # `bool` does nothing
        if work:
            believed, starts_us, durs = self._believed(work)
            self._work.add(believed, all_facts(believed), starts_us, durs, self._work.rows)
            self._linked = self._linked or isinstance(work[0], Linked)
        if calls:
            self._calls(*self._believed(calls))
        if frames:
            self._add(self._host.frames, self._known_frames, self._frame, *self._believed(frames))
        if others:
            self._operators(others, special)

    def _believed(self, events: list[Complete]) -> tuple[list[Complete], list[float], list[float]]:
        """Return the slices with plausible times, and their starts and durations. Other slices are counted as
        problems.
        """
        starts_us, durs = [event.ts for event in events], [event.dur for event in events]
        first, last = self._near
        if min(durs) >= 0 and (
            (first, last) == _ALL or (min(starts_us) >= first and max(map(add, starts_us, durs)) <= last)
        ):
            return events, starts_us, durs
        kept = []
        for event in events:
            if event.dur < 0:
                self.notes.events(OF_NO_TIME)
            elif event.ts < first or event.ts + event.dur > last:
                self.notes.events(NOT_NEAR)
            else:
                kept.append(event)
        return kept, [event.ts for event in kept], [event.dur for event in kept]

    def _operators(self, given: list[Complete], special: Sequence[int]) -> None:
        """Add operators, and the ranges that nest with them.

        Args:
            special: Indices of the events that are added one by one: ranges, waits, and operators if the
                trace has shapes.
        """
        events, starts_us, durs = self._believed(given)
        one_by_one = special if len(events) == len(given) else range(len(events))
        numbers = self._add(
            self._nested.threads, self._known, self._other, events, starts_us, durs, one_by_one
        )
        known = self._backward
        backward = [event for event, number in zip(events, numbers, strict=True) if number in known]
        if backward:
            self._of_backward(backward)

    def _add(
        self,
        slices: dict[int, Slices],
        known: Mapping[str, int],
        add_one: Callable[[Complete], None],
        events: Sequence[Complete],
        starts_us: Sequence[float],
        durs: Sequence[float],
        special: Iterable[int] = (),
    ) -> list[int]:
        """Add events to the slices of their threads, in the order of the file. Return the number of each
        event's name, or -1 for an event that was not known by name.

        Args:
            known: {name: number} for events that can be added many at a time.
            add_one: Called for any other event, and for the events in `special`.
        """
        numbers = [known.get(event.name, -1) for event in events]
        for at in special:
            numbers[at] = -1
        threads = self._threads(events)
        others = [at for at, number in enumerate(numbers) if number < 0] if -1 in numbers else []
        begun = 0
        for other in (*others, len(events)):
            for thread, run in groupby(threads[begun:other]):
                ended = begun + len(list(run))
                slices[thread].extend(starts_us[begun:ended], durs[begun:ended], numbers[begun:ended])
                begun = ended
            if other < len(events):
                add_one(events[other])
                begun = other + 1
        return numbers

    def _threads(self, events: Sequence[Complete]) -> list[int]:
        """Return the number of each event's thread. Fast if all events have the same thread, as is usual."""
        pids, tids, number = (
            [event.pid for event in events],
            [event.tid for event in events],
            self._host.thread,
        )
        if events and pids.count(pids[0]) == tids.count(tids[0]) == len(events):
            return [number((pids[0], tids[0]))] * len(events)
        return list(map(number, zip(pids, tids, strict=True)))

    def _other(self, event: Complete) -> None:
        if event.cat in _OPERATORS:
            self._operator(event)
        elif event.cat in _ANNOTATIONS:
            self._annotation(event)
        elif event.cat in _SYNCS:
            self._wait(event)
        else:
            self.seen(event.ts, event.ts + event.dur)

    def _asynchronous(self, event: Begin | End) -> None:
        """Add a collective that NCCL's example profiler has written as a pair of asynchronous events.

        The format is that of `ext-profiler/example/print_event.cc` in NCCL. An id is unique among the events
        of one category and process.
        """
        if event.kind not in _NCCL_CALLS:
            return
        key = event.pid, event.kind, event.id
        if isinstance(event, Begin):
            self._begun[key] = event.name, event.ts
        elif key in self._begun:
            name, start = self._begun.pop(key)
            if event.ts >= start:
                self._ran(name, "communication", start, event.ts - start)
                self.seen(start, event.ts)

    def _operator(self, event: Complete) -> None:
        """Add an operator that has a new name or shapes."""
        key = name = event.name
        if isinstance(event, Shaped) and event.args is not None:
            self.flops.add(name, event.ts, event.args.dims)
            key = operator_key(name, event.args.dims, self._nested.keys, len(self._nested.keys))
        if is_range(name):
            self._name_range(event)
            self._open(event, key)
            return
        number = self._open(event, key)
        if name == _COMMS:
            said = facts_of(event)
            known = (said.op, said.dtype, said.sent, said.received, said.members)
            self._links.collective(complete=all(map(bytes, known)))
            return
        if name.startswith(BACKWARD):
            self._backward.add(number)
            self._of_backward([event])
        if key == name:
            self._known[name] = number

    def _of_backward(self, events: Sequence[Complete]) -> None:
        """Add the links of operators of torch's backward pass."""
        facts = all_facts(events)
        self._links.backward(
            [event.name for event in events],
            [said.thread for said in facts],
            [said.sequence for said in facts],
        )

    def _wait(self, event: Complete) -> None:
        facts = facts_of(event)
        if event.name == "Stream Synchronize" and facts.device >= 0 and isinstance(event.tid, int):
            self._host.wait(facts.device, event.tid, event.ts)
        record, kind = None if facts.record < 0 else facts.record, bytes(facts.sync)
        if kind == b'"Stream Wait Event"' or (kind == b'"Event Sync"' and record is None):
            self._links.wait(event.ts, record)

    def _frame(self, event: Complete) -> None:
        thread = self._host.thread((event.pid, event.tid))
        self._host.frame(event.name, event.ts, event.dur, thread)
        if event.name.startswith(MODULE):
            self._labels.add(event.name.removeprefix(MODULE), event.ts, event.dur, thread)
        elif event.name != GC:
            self._known_frames[event.name] = self._host.names.number(event.name)

    def _open(self, event: Complete, key: str) -> int:
        """Add an operator or a range, and return its number."""
        thread = self._host.thread((event.pid, event.tid))
        return self._nested.add(key, event.ts, event.dur, thread)

    def _add_up(self) -> list[Work]:
        """Add up the work of devices. Return the kind of work of each name."""
        work, known = self._work, list(self._work.names)
        works = [work_of(category, name) for category, name in zip(work.categories, known, strict=True)]
        for name, kind, totals in zip(known, works, work.totals(), strict=True):
            if totals.calls:
                kernel = self.kernels.setdefault(name, Kernel(name, kind))
                kernel.count += totals.calls
                kernel.total_us += totals.total_us
                kernel.max_us = max(kernel.max_us, totals.max_us)
        if not self._linked:  # slices of other readers may stand for graphs or groups of launches
            self._launches.ran(work.rows.correlations, work.rows.starts)
        talks = {number for number, kind in enumerate(works) if kind == "communication"}
        syncs = {number for number, kind in enumerate(works) if kind == "sync"}
        copies = {number for number, name in enumerate(known) if _TO_DEVICE.search(name)} - talks
        told = talks | copies | syncs
        for start, dur, number in zip(work.rows.starts, work.rows.durs, work.rows.names, strict=True):
            if number not in told:
                continue
            if number in syncs:
                self.seen(start, start + dur)
            elif number in copies:
                self._steps.add_copy(start, dur)
            else:
                self.collectives[known[number]].extend((start, start + dur))
        if syncs:
            self._work.leave_out(syncs)
        return works

    def _ran(self, name: str, category: str, start: float, dur: float) -> None:
        """Add a collective."""
        kernel = self.kernels.setdefault(name, Kernel(name, work_of(category, name)))
        kernel.count += 1
        kernel.total_us += dur
        if dur > kernel.max_us:
            kernel.max_us = dur
        if kernel.work == "communication":
            self.collectives[name].extend((start, start + dur))

    def _calls(self, events: Sequence[Complete], starts_us: Sequence[float], durs: Sequence[float]) -> None:
        """Add calls into the runtime of a device."""
        self._runtime = self._runtime or bool(events)
        self._unit = next((_UNITS[call.cat] for call in events if call.cat in _UNITS), self._unit)
        names, numbers = [event.name for event in events], [said.correlation for said in all_facts(events)]
        callers = self._threads(events)
        self._host.launched(numbers, starts_us, callers)
        self._host.calls(names, starts_us, durs, callers)
        self._launches.called(names, starts_us, numbers)
        self._links.called(names, starts_us, numbers)

    def _annotation(self, event: Complete) -> None:
        if is_collective(event.name):
            self.collectives[event.name].extend((event.ts, event.ts + event.dur))
            self._host.collective(event.name, event.ts, event.dur)
            return
        iteration = iteration_of(event.name, event.ts, event.dur)
        if iteration is not None:
            self.iterations[event.cat, event.pid, event.tid].append(iteration)
        # `gpu_user_annotation` repeats a range with the times on the GPU.
        elif event.cat != "gpu_user_annotation":
            self.seen(event.ts, event.ts + event.dur)
            self._steps.add(event.name, event.ts, event.dur)
            self._name_range(event)
            self._open(event, mark_key(event.name, self._nested.keys, len(self._nested.keys)))

    def _name_range(self, event: Complete) -> None:
        name, thread = mark_name(event.name), self._host.thread((event.pid, event.tid))
        if name is None:
            return  # the range is an operator from `emit_nvtx`
        self._host.mark(event.name, event.ts, event.dur)
        if event.cat in _OPERATORS:  # a range written as an operator, as by `_RecordFunctionFast`
            self._steps.add(event.name, event.ts, event.dur)
        self._labels.add(name, event.ts, event.dur, thread)

    def describe(self, event: Metadata) -> None:
        """Keep what an event says of a device."""
        name = bytes(event.name)
        if name == b'"process_labels"':
            self._labels_of[bytes(event.pid)] = bytes(event.args)
        elif name == b'"thread_name"' and (named := _OF_DEVICE.search(event.args)) is not None:
            self._device_of[bytes(event.pid), bytes(event.tid)] = named[1].decode()

    def _names_of_devices(self) -> dict[int | str, str]:
        """Return {device: its name}: the device's `process_labels` such as `MTIA 9`, or else `GPU 9`."""
        names = dict[int | str, str]()
        for track in self._work.tracks:
            key = track.device
            names.setdefault(key, f"{self._unit} {key}" if str(key).isdigit() else str(key))
            with suppress(msgspec.DecodeError):
                args = self._labels_of.get(_json(track.row[0]), b"")
                label = msgspec.json.decode(args, type=ProcessLabels).labels
                if label.endswith(f" {key}") and not label.startswith("GPU "):
                    names[key] = label
        return names

    def _instant(self, event: Instant) -> None:
        if event.name == "[memory]" and event.args is not None:
            self._memory(event.ts, event.args)

    def _memory(self, ts: float, args: MemoryArgs) -> None:
        if args.allocated is None or args.kind is None:
            return
        device = args.kind, 0 if args.device is None else max(0, args.device)
        peak = self.peaks.get(device)
        if peak is None:
            peak = self.peaks[device] = Peak(_device_name(*device), 0, ts, 0, None)
        if args.allocated > peak.allocated_bytes:
            peak.allocated_bytes, peak.allocated_at_us = args.allocated, ts
        peak.reserved_bytes = max(peak.reserved_bytes, args.reserved or 0)

    def seen(self, start: float, end: float) -> None:
        """Extend the recorded time of the trace so that it includes `start` to `end`."""
        self.first, self.last = min(self.first, start), max(self.last, end)

    def finish(self, fields: TraceFields) -> TraceContent:
        self._work.place(lambda pid, tid: self._device_of.get((_json(pid), _json(tid))))
        self._nested.nest()
        ran = Stretches.joined(self._nested.ran.values())
        if ran:
            self.seen(ran.first, ran.last)
        works = self._add_up()
        order_of = None if self._linked else self._launches.stream
        streams = self._work.by_stream([work == "compute" for work in works], order_of)
        covers = self._devices(works)
        names = self._names_of_devices()
        devices = [_device(names[key], covers[key]) for key in sorted(covers, key=_by_name)]
        for device in devices:
            self.seen(device.first_us, device.last_us)
        calls = (unpacked(times) for name, times in self.collectives.items() if ":" in name)
        on_cpu = Stretches(sorted(chain.from_iterable(calls)))
        if self._begun:
            self.notes.events("collectives that never ended", len(self._begun))
        doubts = [*self._launches.doubts(), (UNSYNCED, self._host.unsynced()), *self._links.doubts()]
        for what, number in filter(itemgetter(1), doubts):
            self.notes.events(what, number)
        if self._within is not None:
            self.seen(*self._within)
        backward = self._nested.times_of(self._backward)
        steps = self._steps.finish(covers.values(), backward)
        covers.clear()  # free memory before the gaps are computed
        self._launches = Launches()
        gaps = self._host.gaps(self.first, self.last)
        if self._within is not None:
            gaps.end_by(self._within[1])
        inside = in_steps(gaps, [(step.start_us, step.start_us + step.dur_us) for step in steps])
        for step, kinds in zip(steps, inside, strict=True):
            step.idle = kinds
        for (kind, number), peak in self.peaks.items():
            total = (device.total_bytes for device in fields.devices if device.id == number and kind)
            peak.capacity_bytes = next(total, None)
        return TraceContent(
            base_ns=fields.base_ns,
            distributed=fields.distributed,
            host=fields.host,
            first_us=self.first if self.first <= self.last else None,
            last_us=self.last if self.first <= self.last else None,
            events=self.events,
            operators=sorted(filter(_ran, self._nested.operators), key=_by_own_time),
            operators_us=ran.length,
            waiting_us=length(ran.leave(on_cpu)),
            kernels=sorted(self.kernels.values(), key=lambda kernel: (-kernel.total_us, kernel.name)),
            devices=devices,
            streams=[Stream(names[device], us) for (device, _), us in streams.items()],
            sized=list(self.sized.values()),
            collectives=[_collective(name, times) for name, times in sorted(self.collectives.items())],
            grouped=[
                GroupCalls(op, group, times.tobytes(), numbers.tobytes())
                for (op, group), (times, numbers) in sorted(self.grouped.items())
            ],
            iterations=self._iterations(),
            memory=list(self.peaks.values()),
            runtime=self._runtime,
            flops=self.flops.in_order(),
            device_names=[properties.name for properties in fields.devices if properties.name is not None],
            steps=steps,
            gaps=by_cause(gaps),
            labels=self._labels.finish(self._host, gaps, steps),
            problems=dict(self.notes.counts),
        )

    def _devices(self, works: Sequence[Work]) -> dict[int | str, dict[Work, Stretches]]:
        """Return {device: {kind of work: times}}. Keep the kernels, to find the gaps later."""
        work = self._work
        streams = [stream_number(track.stream) for track in work.tracks]
        talks = [kind == "communication" for kind in works]
        covers = dict[int | str, dict[Work, Stretches]]()
        for device, rows in work.by_device(work.rows):
            kernels = self._host.devices[device] = DeviceKernels(rows, streams, talks)
            covers[device] = _covers(kernels, [works[name] for name in rows.names])
        if work.beyond.starts:
            for device, rows in work.by_device(work.everything()):
                self._host.devices[device] = DeviceKernels(rows, streams, talks)
        return covers

    def _iterations(self) -> list[Iteration]:
        """Return the iterations of one track. A device's track is preferred, because it shows how long the
        device ran.
        """

        def worth(key: tuple[str, int | str, int | str]) -> tuple[bool, int, str]:
            return key[0] == "gpu_user_annotation", len(self.iterations[key]), str(key)

        best = max(self.iterations, key=worth, default=None)
        iterations = [] if best is None else self.iterations[best]
        return sorted(iterations, key=lambda iteration: iteration.start_us)


def _read(
    path: Path,
    near: tuple[float, float] | None,
    on_read: Callable[[int], None] | None,
    step_mark: str | None,
    within: Pair | None,
) -> TraceContent:
    trace = ChromeTrace(path)
    reading = Reading(trace.notes, near, step_mark, within)
    fields = trace.read(reading.parse, reading.take, on_read)
    since_ns = fields.base_ns if not reading.since_ns else reading.since_ns + (fields.base_ns or 0)
    fields = msgspec.structs.replace(fields, base_ns=wall_base(since_ns, middle(reading.times)))
    return reading.finish(fields)


def _ran(operator: Operator) -> bool:
    return operator.count > 0  # the count is 0 if the operator ran only outside of the times that are read


def _by_own_time(operator: Operator) -> tuple[float, str, str]:
    return -operator.self_us, operator.name, operator.shapes


def _covers(kernels: DeviceKernels, works: Sequence[Work]) -> dict[Work, Stretches]:
    pairs = (zip(kernels.starts, kernels.ends, strict=True) for _ in works)
    return {work: Stretches(compress(next(pairs), map(work.__eq__, works))) for work in dict.fromkeys(works)}


def _device(name: str, stretches: dict[Work, Stretches]) -> Device:
    nothing = Stretches()
    compute, communication = stretches.get("compute", nothing), stretches.get("communication", nothing)
    memory = stretches.get("memory", nothing)
    exposed_us = length(compute.leave(communication))
    return Device(
        name=name,
        first_us=min(some.first for some in stretches.values()),
        last_us=max(some.last for some in stretches.values()),
        busy_us=compute.length + exposed_us + length(communication.leave(compute.leave(memory))),
        compute_us=compute.length,
        communication_us=communication.length,
        exposed_us=exposed_us,
        memory_us=memory.length,
    )


def _by_name(key: int | str) -> tuple[bool, int, str]:
    return isinstance(key, str), key if isinstance(key, int) else 0, str(key)


def _collective(name: str, times: array[float]) -> Collective:
    ascending = array("d", chain.from_iterable(sorted(unpacked(times))))
    return Collective(name, ascending.tobytes())


def _device_name(kind: int, number: int) -> str:
    # c10::DeviceType
    names = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "npu"}
    name = names.get(kind, f"device type {kind}")
    return name if name == "cpu" else f"{name}:{number}"
