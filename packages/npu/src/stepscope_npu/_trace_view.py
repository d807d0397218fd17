"""Reader of `trace_view.json`, which is nearly a Chrome trace.

The file is a JSON list. `ts` is text, unix us with digits down to the ns (a float would lose 0.25 us); `dur`
is us. Events of one layer share a pid. `Python` has the real pid, every other layer a made-up pid (`os_pid <<
10 | layer << 5 | device`, above 2^32 in older files, or -1). Only the event `process_name` states the layer
of a pid. This event may come last, so the file is read twice.

Layers: `Python`, `Python GC`; `CANN` (its calls); a layer with the name of the process (mstx ranges); `Ascend
Hardware` (a thread for each stream); `Communication` (formerly `HCCL`); `Overlap Analysis` (derived from
`Ascend Hardware` and `Communication`); counters. Format: torch_npu's and msprof's own writers, and their
published guides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from stepscope_npu._layers import layer_category
from stepscope_report.timeline.readers import (
    Clock,
    Counter,
    Event,
    Flow,
    Instant,
    Notes,
    Origin,
    Slice,
    Track,
    chrome_events,
    clock_of,
)

NOT_UNDERSTOOD = "events that are not of the form that trace_view.json has"
NO_TIME = "events without a time"
_FIRST = 100
"""Number of events at the beginning of a file from which its clock is determined."""
_Key: TypeAlias = tuple[int, int | str]
_LAYERS = ("Python", "Python GC", "CANN", "Ascend Hardware", "Communication", "HCCL", "Overlap Analysis")
_SORT = {name: 100 * place for place, name in enumerate(_LAYERS)}
_CATEGORIES = {"CANN": "cuda_runtime", "Communication": "communication", "HCCL": "communication"}
_POINTS: Mapping[str, Literal["start", "step", "end"]] = {"s": "start", "t": "step", "f": "end"}


class Entry(msgspec.Struct, gc=False):
    """An event of the trace."""

    ph: str
    name: str = ""
    pid: int = 0
    tid: int | str = 0
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: float | str = 0.0
    cat: str | None = None
    id: int | str | None = None
    args: dict[str, Any] | None = None


_entry = msgspec.json.Decoder(Entry).decode


class TraceView:
    """An open `trace_view.json`. `correction_ns` is added to its times, unless they contain times of CANN."""

    def __init__(self, path: Path, notes: Notes, correction_ns: int, origin: Origin) -> None:
        self._path = path
        self._notes = notes
        self._correction_ns = correction_ns
        self._layers: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._threads: dict[_Key, str] = {}
        self._tracks: dict[_Key, int] = {}
        self._shift_ns = 0
        self.origin = msgspec.structs.replace(origin, clock=self._clock())

    def _clock(self) -> Clock:
        """Return the clock of the file's times, from its first events. torch_npu writes unix times, or times
        since the recording's start.
        """
        entries = (entry for entry in self._entries(Notes()) if entry.ph != "M")
        first = (nanoseconds(bytes(entry.ts)) for entry in islice(entries, _FIRST))
        return clock_of(at_ns for at_ns in first if at_ns is not None)

    def close(self) -> None:
        pass

    def events(self) -> Iterator[Event]:
        self._read_names()
        of_host_alone = all(layer.startswith("Python") for layer in self._layers.values())
        self._shift_ns = self._correction_ns if of_host_alone else 0
        ranges: list[Slice] = []
        for entry in self._entries(self._notes):
            if entry.ph == "M":
                continue
            at_ns = nanoseconds(bytes(entry.ts))
            if at_ns is None:
                self._notes.events(NO_TIME)
                continue
            yield from self._declare(entry)
            event = self._event(entry, at_ns + self._shift_ns)
            if isinstance(event, Slice) and event.category == "user_annotation":
                ranges.append(event)  # ranges may overlap, and are yielded by start
            elif event is not None:
                yield event
        yield from sorted(ranges, key=lambda event: event.start_ns)

    def _entries(self, notes: Notes) -> Iterator[Entry]:
        for raw in chrome_events(self._path, notes):
            try:
                yield _entry(raw)
            except msgspec.MsgspecError:
                notes.events(NOT_UNDERSTOOD)

    def _read_names(self) -> None:
        for raw in chrome_events(self._path, Notes()):  # the second reading, of the events, makes the notes
            if b'"M"' not in bytes(raw):
                continue
            try:
                entry = _entry(raw)
            except msgspec.MsgspecError:
                continue
            if entry.ph != "M" or not entry.args:
                continue
            value = next(iter(entry.args.values()))
            if entry.name == "process_name":
                self._layers[entry.pid] = str(value)
            elif entry.name == "process_labels":
                self._labels[entry.pid] = str(value)
            elif entry.name == "thread_name":
                self._threads[entry.pid, entry.tid] = str(value)

    def _declare(self, entry: Entry) -> Iterator[Track]:
        key = (entry.pid, entry.tid)
        if key in self._tracks:
            return
        self._tracks[key] = len(self._tracks)
        layer = self._layers.get(entry.pid, f"layer {entry.pid}")
        thread = self._threads.get(key, f"thread {entry.tid}").replace("Thread ", "thread ")
        label = self._labels.get(entry.pid, "")
        is_range = self._is_range(entry)
        if layer == "Python":
            name = thread
        elif is_range:
            name = f"mstx {thread}"
        elif layer == "Ascend Hardware":
            name = f"{label or 'NPU'} {thread[:1].lower()}{thread[1:]}"
        else:
            name = " ".join(filter(None, (label if label.startswith("NPU") else "", layer, thread)))
        yield Track(
            track=self._tracks[key], name=name, device=(label or "NPU") if _runs(layer, thread) else None,
            sort=_SORT.get(layer, 50 if is_range else 600), overlapping=is_range,
        )  # fmt: skip

    def _is_range(self, entry: Entry) -> bool:
        """Return whether an entry is in the layer of mstx ranges, which is named after the program."""
        return self._layers.get(entry.pid) not in _LAYERS and "event_type" in (entry.args or {})

    def _event(self, entry: Entry, at_ns: int) -> Event | None:
        track = self._tracks[entry.pid, entry.tid]
        if entry.ph == "X":
            dur_ns = _duration(entry.dur)
            if dur_ns is None:
                self._notes.events(NO_TIME)
                return None
            return Slice(
                track=track, name=entry.name, start_ns=at_ns, dur_ns=dur_ns, category=self._category(entry),
                args=entry.args,
            )  # fmt: skip
        if entry.ph in ("i", "I"):
            return Instant(track=track, name=entry.name, at_ns=at_ns, category=entry.cat, args=entry.args)
        if entry.ph == "C":
            values = {
                name: value for name, value in (entry.args or {}).items() if isinstance(value, int | float)
            }
            name = f"{self._labels.get(entry.pid, '')} {entry.name}".strip()
            return Counter(track=track, name=name, at_ns=at_ns, values=values)
        if entry.ph in _POINTS and entry.id is not None:
            return Flow(
                track=track, at_ns=at_ns, id=f"{entry.cat}:{entry.id}", point=_POINTS[entry.ph],
                name=entry.cat or entry.name, category=entry.cat,
            )  # fmt: skip
        self._notes.events(NOT_UNDERSTOOD)
        return None

    def _category(self, entry: Entry) -> str | None:
        layer = self._layers.get(entry.pid)
        if layer == "Ascend Hardware":
            return _hardware_category(entry.name, (entry.args or {}).get("Task Type"))
        if entry.cat is not None:
            return entry.cat
        if self._is_range(entry):
            return "user_annotation"
        return _CATEGORIES.get(layer or "")


def _hardware_category(name: str, task_type: object) -> str | None:
    """Return the category of a task from its type, or None if it does no work. Tasks of MindIE have no type
    and count as kernels.
    """
    if task_type is None:
        return "kernel"
    category = layer_category(task_type)
    # A task whose name is its type belongs to no operator: a part of a collective, or a wait of HCCL.
    return None if name == task_type and category != "communication" and "MEMCPY" not in name else category


def _runs(layer: str, thread: str) -> bool:
    """Return whether a track shows work of a device. Tracks `Plane N` do not count, because they show parts
    of collectives that another track shows as a whole.
    """
    return layer == "Ascend Hardware" or (
        layer in ("Communication", "HCCL") and not thread.lower().startswith("plane")
    )


def nanoseconds(text: bytes) -> int | None:
    """Return a `ts` (us, as text or as a number) in whole ns, or None if it is not a number."""
    whole, _, rest = text.strip(b'"').partition(b".")
    try:
        return int(whole) * 1000 + int(rest.ljust(3, b"0")[:3] or b"0")
    except ValueError:
        return None


def _duration(us: float | str) -> int | None:
    try:
        dur_ns = round(float(us) * 1000)
    except (ValueError, OverflowError):
        return None
    return dur_ns if dur_ns >= 0 else None
