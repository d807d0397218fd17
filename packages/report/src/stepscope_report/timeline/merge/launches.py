"""Arrows from an engine's forward passes to their first work on a device, read off the written events of its
traces.

An engine's worker annotates each pass with the numbers of its requests. A launch within that annotation, on
its thread, leads by its correlation to what it launched, also to the kernels of a replayed CUDA graph. Passes
and annotations are matched by their order and numbers: a worker may launch a pass before the one before it
has ended.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import TypeAlias

import msgspec

from stepscope_report.timeline.activity.event_names import iteration_of
from stepscope_report.timeline.merge.mapping import FlowIds
from stepscope_report.timeline.merge.rewrite import Text
from stepscope_report.timeline.merge.tracks import Event, microseconds
from stepscope_report.timeline.model import EnginePasses

_FLOW = re.compile(rb'\{[^{}]*"ac2g"[^{}]*\}')
_ANNOTATION = re.compile(rb'\{[^{}]*"user_annotation"(?:[^{}]|\{[^{}]*\})*\}')
_Thread: TypeAlias = "tuple[int, int]"


class _Seen(msgspec.Struct):
    """The fields of an event that are used."""

    ph: str
    pid: int
    tid: int
    ts: float
    dur: float = 0.0
    id: int = 0
    cat: str = ""
    name: str = ""


_decode = msgspec.json.Decoder(_Seen).decode


class Launches:
    """Annotations and launches in the events of one engine's workers. The first worker with an annotation
    counts, because all workers run the same passes.
    """

    def __init__(self) -> None:
        self._annotations: list[tuple[float, float, int, int, _Thread]] = []
        """(start, end, requests, prefilling requests, thread) of each pass."""
        self._launches: defaultdict[_Thread, list[tuple[float, int]]] = defaultdict(list)
        """(time, correlation) by thread."""
        self._work: dict[int, _Seen] = {}
        """{correlation: the first event on a device}."""

    def see(self, text: Text) -> None:
        """Note the annotations and launches in written events."""
        content = bytes(text)
        for found in _FLOW.finditer(content) if b'"ac2g"' in content else ():
            flow = _event(found[0])
            if flow is not None and flow.cat == "ac2g" and flow.ph == "s":
                self._launches[flow.pid, flow.tid].append((flow.ts, flow.id))
            elif flow is not None and flow.cat == "ac2g" and flow.ph == "f":
                known = self._work.get(flow.id)
                self._work[flow.id] = flow if known is None or flow.ts < known.ts else known
        for found in _ANNOTATION.finditer(content) if b'"user_annotation"' in content else ():
            event = _event(found[0])
            named = None if event is None or event.ph != "X" else iteration_of(event.name)
            if event is None or named is None or event.cat != "user_annotation":
                continue
            thread = event.pid, event.tid
            if not self._annotations or self._annotations[0][4] == thread:
                requests = named.prefills + named.decodes
                end = event.ts + event.dur
                self._annotations.append((event.ts, end, requests, named.prefills, thread))

    def arrows(
        self, engine: EnginePasses, wanted: Set[int], track: Event, base_ns: int, ids: FlowIds
    ) -> Iterator[Event]:
        """Yield arrows from passes to their first work on a device.

        Args:
            wanted: The passes, by position.
            track: The pid and tid of the drawn passes.
        """
        for at, work in self._first_work(engine, base_ns).items():
            if at in wanted:
                number = ids.number(b"%d-%d-%d" % (engine.replica, engine.noted.dp, at), "kernel")
                common: Event = {"cat": "stepscope", "name": "first kernel", "id": number}
                start = float(microseconds(engine.begins_ns[at] - base_ns))
                yield {"ph": "s", **common, **track, "ts": min(start, work.ts)}
                yield {"ph": "f", "bp": "e", **common, "pid": work.pid, "tid": work.tid, "ts": work.ts}

    def _first_work(self, engine: EnginePasses, base_ns: int) -> Mapping[int, _Seen]:
        for launches in self._launches.values():
            launches.sort()
        first: dict[int, _Seen] = {}
        place, until = 0, 0.0
        for start, end, requests, prefills, thread in sorted(self._annotations):
            if start < until:
                continue  # SGLang marks a pass twice, one annotation in the other
            until = end
            at = self._pass_of(engine, place, base_ns, start, end, requests, prefills)
            if at is None:
                continue
            place = at + 1
            launches = self._launches[thread]
            for ts, correlation in launches[bisect_left(launches, (start, 0)) :]:
                if ts > end:
                    break
                if correlation in self._work:
                    first[at] = self._work[correlation]
                    break
        return first

    def _pass_of(
        self,
        engine: EnginePasses,
        place: int,
        base_ns: int,
        start: float,
        end: float,
        requests: int,
        prefills: int,
    ) -> int | None:
        """Return the first pass from `place` on that has the numbers of an annotation, ended after its start,
        and is at most one pass ahead of it.
        """
        facts = engine.noted.passes
        for at in range(place, len(engine.begins_ns)):
            if at and (engine.begins_ns[at - 1] - base_ns) / 1000 > end:
                return None
            if (engine.ends_ns[at] - base_ns) / 1000 < start or facts.requests[at] != requests:
                continue
            if (facts.kind[at] in ("decode", "speculative")) == (prefills == 0):
                return at
        return None


def _event(content: bytes) -> _Seen | None:
    try:
        return _decode(content)
    except msgspec.DecodeError:
        return None
