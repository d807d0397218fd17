"""Notes of an engine's forward passes during a capture, and the file of them.

Code in the process that schedules the passes calls `PassLog`: an adapter's hook, or an engine of your own:

    log = passes.current()
    if log is not None:
        log.note(began_ns, ended_ns, "decode", {request.id: 1 for request in batch}, ...)
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
from msgspec.structs import asdict

from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import EngineCapture
from stepscope.errors import RecordError
from stepscope.files import passes as records
from stepscope.files.layout import safe
from stepscope.files.passes import PassFile, PassKind, Version
from stepscope.files.sidecar import Artifact
from stepscope.files.storage.atomic import free_path, write_atomic

T = TypeVar("T")
TOOL = "stepscope"
"""`Artifact.tool` of such a file: no profiler of the engine writes it."""
log = logging.getLogger("stepscope")
_KINDS: Sequence[PassKind] = get_args(PassKind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_UNKNOWN = -1.0
_current: PassLog | None = None
"""The log of the running capture that the engine of this process writes to, or None. One writer: `begin` and
`end`."""
_kept: PassRing | None = None
"""The passes that the flight recorder keeps of this process' engine between captures, or None. One writer:
`keep`."""
_PASS_BYTES, _SERVED_BYTES, _REQUEST_BYTES = 45, 24, 400
"""Memory of a pass, of a request in a pass, and of a request."""


class _Positions(dict[str, int]):
    """{id of a request: its position}. A new id gets the next position."""

    def __missing__(self, key: str) -> int:
        self[key] = position = len(self)
        return position


class PassLog:
    """The passes of one engine since the log was made. May be used from any thread.

    Args:
        most: Number of passes to keep. Further ones are counted.
    """

    def __init__(self, most: int) -> None:
        self.dropped = 0
        self._most = most
        self._opened = read_anchor()
        self._lock = threading.Lock()
        self._positions = _Positions()
        self._callers: dict[str, str] = {}
        self._arrived: dict[str, int] = {}
        self._versions: list[tuple[int, Version]] = []
        """(number of passes before it, version of the weights), in order."""
        self._updates: list[tuple[int, int | None]] = []
        """(number of passes before it, count of the updates of the weights), in order."""
        self._begins, self._ends = array("q"), array("q")
        self._kinds, self._kv_use = array("b"), array("f")
        self._counts, self._running, self._waiting = array("l"), array("l"), array("l")
        self._requests, self._tokens, self._outputs = array("l"), array("l"), array("l")
        self._last_ids: list[str] = []
        """Ids of the requests of the last pass; `_last_positions` are their positions."""
        self._last_positions = array("l")
        self._preempted: list[tuple[int, str]] = []
        self._stale: Version = None
        """Version of the weights before the last update, until another one is stated; or None."""
        self._weights: list[tuple[int, Version]] = []
        """(time, version of the weights from then on), in order."""

    def arrive(self, request: str, *, caller_id: str | None = None, at_ns: int | None = None) -> None:
        """Note that a request was put into the engine's queue.

        Args:
            caller_id: The id under which the caller knows the request, if it differs.
            at_ns: Time by CLOCK_MONOTONIC; None for now.
        """
        with self._lock:
            self._arrived[request] = time.monotonic_ns() if at_ns is None else at_ns
            self._positions[request]
        if caller_id is not None:
            self.name(request, caller_id)

    def name(self, request: str, caller_id: str) -> None:
        """Note the id under which the caller knows a request."""
        self._callers[request] = caller_id

    def update(self, at_ns: int | None = None) -> None:
        """Note that the engine has new weights. The version that was stated before is not theirs.

        Args:
            at_ns: Time by CLOCK_MONOTONIC; None for now.
        """
        self._weights.append((time.monotonic_ns() if at_ns is None else at_ns, None))
        last = self._versions[-1][1] if self._versions else None
        self._stale = self._stale if last is None else last

    @property
    def unnamed(self) -> list[str]:
        """Return the ids of the requests whose caller's id was not noted."""
        return [request for request in self._positions if request not in self._callers]

    def note(
        self,
        begin_ns: int,
        end_ns: int,
        kind: PassKind,
        tokens: Mapping[str, int],
        output: Iterable[int],
        *,
        running: int,
        waiting: int,
        kv_use: float | None = None,
        weights: Version = None,
        updates: int | None = None,
        preempted: Iterable[str] = (),
    ) -> None:
        """Note one forward pass.

        Args:
            begin_ns: Begin by CLOCK_MONOTONIC. `end_ns` likewise.
            tokens: {id of a request: number of its tokens that the pass computed}.
            output: The tokens that the pass added to each request's output, in the order of `tokens`.
            kv_use: Used part of the KV cache, from 0 to 1.
            weights: Version of the weights, if whoever updated them stated one.
            updates: Number of updates of the weights since the engine started, if it is counted.
            preempted: The requests that lost their place in the KV cache since the pass before.
        """
        with self._lock:
            if self._is_full():
                self.dropped += 1
                return
            number = len(self._begins)
            self._begins.append(begin_ns)
            self._ends.append(end_ns)
            self._kinds.append(_CODES[kind])
            self._counts.append(len(tokens))
            self._running.append(running)
            self._waiting.append(waiting)
            self._kv_use.append(_UNKNOWN if kv_use is None else kv_use)
            ids = list(tokens)
            if ids != self._last_ids:  # a batch that decodes stays the same for many passes
                self._last_ids = ids
                self._last_positions = array("l", list(map(self._positions.__getitem__, ids)))
            self._requests.extend(self._last_positions)
            # `extend` of another iterable grows the array number by number.
            self._tokens.fromlist(list(tokens.values()))
            self._outputs.fromlist(list(output))
            self._preempted += [(number, request) for request in preempted]
            weights = None if weights == self._stale else weights
            if weights != (self._versions[-1][1] if self._versions else None):
                self._versions.append((number, weights))
                if weights is not None:  # else `update` has the time of the change
                    self._weights.append((begin_ns, weights))
            if updates != (self._updates[-1][1] if self._updates else None):
                self._updates.append((number, updates))

    def _is_full(self) -> bool:
        return len(self._begins) >= self._most

    def file(self, dp: int = 0) -> PassFile:
        """Return all passes so far, as the content of a file. `publish_passes` adds whose they are."""
        with self._lock:
            number, request = zip(*self._preempted, strict=True) if self._preempted else ((), ())
            preempted = records.Preempted(
                number=list(number), request=[self._positions[one] for one in request]
            )
            ids = list(self._positions)
            begun, ended = self._at_ends(self._versions, None)
            updates_begun, updates_ended = self._at_ends(self._updates, None)
            return PassFile(
                step=0,
                run_id="",
                replica=0,
                dp=dp,
                host=socket.gethostname(),
                anchor=self._opened,
                closed=read_anchor(),
                dropped=self.dropped,
                requests=records.Requests(
                    id=ids,
                    caller_id=[
                        None if caller == own else caller
                        for own, caller in zip(ids, map(self._callers.get, ids), strict=True)
                    ],
                    arrived_ns=list(map(self._arrived.get, ids)),
                    version_begun=begun,
                    version_ended=ended,
                    updates_begun=updates_begun,
                    updates_ended=updates_ended,
                ),
                passes=records.Passes(
                    number=list(range(len(self._begins))),
                    begin_ns=self._begins.tolist(),
                    end_ns=self._ends.tolist(),
                    kind=[_KINDS[code] for code in self._kinds],
                    requests=self._counts.tolist(),
                    running=self._running.tolist(),
                    waiting=self._waiting.tolist(),
                    kv_use=[None if use < 0 else round(use, 4) for use in self._kv_use],
                ),
                served=records.Served(
                    request=self._requests.tolist(),
                    tokens=self._tokens.tolist(),
                    output=self._outputs.tolist(),
                ),
                preempted=preempted,
                weights=records.Weights(
                    at_ns=[at_ns for at_ns, _ in self._weights],
                    version=[version for _, version in self._weights],
                ),
            )

    def _at_ends(self, changes: Sequence[tuple[int, T]], before: T) -> tuple[list[T], list[T]]:
        """Return the values at the first and at the last pass of each request.

        Args:
            changes: (number of passes before it, new value), in order.
            before: The value before the first change.
        """
        begun: dict[int, T] = {}
        ended = [before] * len(self._positions)
        rows = list(accumulate(self._counts, initial=0))
        bounds = [(0, before), *((rows[first], value) for first, value in changes), (rows[-1], before)]
        for (first, value), (last, _) in pairwise(bounds):
            for request in set(self._requests[first:last]):
                begun.setdefault(request, value)
                ended[request] = value
        return [begun.get(request, before) for request in range(len(ended))], ended


class PassRing(PassLog):
    """The latest passes of one engine. The older half is dropped when they take more than `memory_mb`."""

    def __init__(self, memory_mb: int) -> None:
        super().__init__(0)
        self._bytes = memory_mb << 20

    def _is_full(self) -> bool:
        size = len(self._begins) * _PASS_BYTES + len(self._requests) * _SERVED_BYTES
        if size + len(self._positions) * _REQUEST_BYTES > self._bytes:
            self._drop(len(self._begins) // 2)
        return False

    def _drop(self, first: int) -> None:
        """Drop the passes before `first`, and the requests that came before it and are served no more."""
        rows = sum(self._counts[:first])
        for column in (self._begins, self._ends, self._kinds, self._kv_use):
            del column[:first]
        for column in (self._counts, self._running, self._waiting):
            del column[:first]
        self._preempted = [
            (number - first, request) for number, request in self._preempted if number >= first
        ]
        later = [(number - first, version) for number, version in self._versions if number > first]
        before = [version for number, version in self._versions if number <= first]
        self._versions = [*((0, version) for version in before[-1:]), *later]
        since_ns = self._begins[0] if self._begins else time.monotonic_ns()
        self._weights = [one for one in self._weights if one[0] >= since_ns]
        ids = list(self._positions)
        served = [ids[position] for position in self._requests[rows:]]
        self._arrived = {one: at_ns for one, at_ns in self._arrived.items() if at_ns >= since_ns}
        lost = [request for _, request in self._preempted]
        self._positions, self._last_ids = _Positions(), []
        self._requests = array("l", map(self._positions.__getitem__, served))
        for request in (*self._arrived, *lost):
            self._positions[request]
        self._callers = {one: name for one, name in self._callers.items() if one in self._positions}
        del self._tokens[:rows], self._outputs[:rows]
        opened = read_anchor()  # the clocks as they are now, at the time from which all passes are there
        self._opened = msgspec.structs.replace(
            opened, wall_ns=opened.wall_ns - opened.mono_ns + since_ns, mono_ns=since_ns
        )


def between(file: PassFile, start_ns: int, end_ns: int) -> PassFile:
    """Return the passes that ran between two times, and the requests that they served or that came meanwhile.

    Args:
        start_ns: Time in unix ns of the engine's host. `end_ns` likewise.
    """
    ahead_ns = file.closed.wall_ns - file.closed.mono_ns
    since_ns, until_ns = max(start_ns - ahead_ns, file.anchor.mono_ns), end_ns - ahead_ns
    begins, ends = file.passes.begin_ns, file.passes.end_ns
    first, last = bisect_right(ends, since_ns), bisect_left(begins, until_ns)
    if first >= last:
        first = last = 0
    part = _rows(file, first, last)
    told, lost = part.requests, part.preempted
    came = [
        at for at, at_ns in enumerate(told.arrived_ns) if at_ns is not None and since_ns <= at_ns < until_ns
    ]
    new = {at: row for row, at in enumerate(sorted({*part.served.request, *lost.request, *came}))}
    weights = [one for one in zip(file.weights.at_ns, file.weights.version, strict=True) if one[0] < until_ns]
    closed = msgspec.structs.replace(file.closed, wall_ns=until_ns + ahead_ns, mono_ns=until_ns)
    return msgspec.structs.replace(
        part,
        anchor=msgspec.structs.replace(file.closed, wall_ns=since_ns + ahead_ns, mono_ns=since_ns),
        closed=min(closed, file.closed, key=lambda anchor: anchor.mono_ns),
        requests=records.Requests(
            **{name: [column[at] for at in new] for name, column in asdict(told).items()}
        ),
        served=msgspec.structs.replace(part.served, request=[new[at] for at in part.served.request]),
        preempted=msgspec.structs.replace(lost, request=[new[at] for at in lost.request]),
        weights=records.Weights(
            at_ns=[at_ns for at_ns, _ in weights], version=[version for _, version in weights]
        ),
    )


def encoded(file: PassFile) -> bytes:
    """Return the bytes of a file of passes."""
    from isal import igzip  # import time: 9 ms, for the end of a capture alone

    packed: bytes = igzip.compress(msgspec.json.encode(file), 1)
    return packed


def write(content: bytes, folder: Path, stem: str) -> Path:
    """Write the bytes of a file of passes, under a name that begins with `stem`, and return its path."""
    path = free_path(folder, stem, records.SUFFIX)
    write_atomic(path, content)
    return path


def take(folder: Path, pattern: str) -> list[PassFile]:
    """Return the files of passes in `folder` that match, and remove them. A damaged one is logged."""
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            found.append(records.read_passes(path))
        except (OSError, RecordError) as error:
            log.warning("stepscope: the engine's notes of forward passes are lost: %s: %s", path, error)
        path.unlink(missing_ok=True)
    return found


def publish_passes(file: PassFile, capture: EngineCapture) -> list[Artifact]:
    """Write the passes of an engine into the capture's folder, and return the artifact; none without a
    pass.
    """
    if not file.passes.number:
        return []
    own = msgspec.structs.replace(
        _first(file, capture.passes), step=capture.step, run_id=capture.run_id, replica=capture.replica
    )
    stem = f"{safe(capture.name)}_dp{file.dp}_{safe(file.host)}"
    artifact = publish(
        write(encoded(own), Path(capture.out_dir), stem),
        capture,
        kind=records.KIND,
        tool=TOOL,
        topology={"dp": file.dp} if file.dp else None,
        host=file.host,
        truncated=f"more than {len(file.passes.number)} passes" if file.dropped else None,
        opened=file.anchor,
        closed=file.closed,
        iterations=len(file.passes.number),
    )
    return [artifact]


def _first(file: PassFile, most: int) -> PassFile:
    """Return the first passes of a file, and count the others."""
    lost = len(file.passes.number) - most
    if lost <= 0:
        return file
    return msgspec.structs.replace(_rows(file, 0, most), dropped=file.dropped + lost)


def _rows(file: PassFile, first: int, last: int) -> PassFile:
    """Return the passes of a file from `first` up to `last`, with all requests."""
    passes, lost = file.passes, file.preempted
    from_row, to_row = sum(passes.requests[:first]), sum(passes.requests[:last])
    numbers = passes.number[first:last]
    kept = [at for at, number in enumerate(lost.number) if number in range(*_span(numbers))]
    return msgspec.structs.replace(
        file,
        passes=records.Passes(**{name: column[first:last] for name, column in asdict(passes).items()}),
        served=records.Served(
            **{name: column[from_row:to_row] for name, column in asdict(file.served).items()}
        ),
        preempted=records.Preempted(
            number=[lost.number[at] for at in kept], request=[lost.request[at] for at in kept]
        ),
    )


def _span(numbers: Sequence[int]) -> tuple[int, int]:
    return (numbers[0], numbers[-1] + 1) if numbers else (0, 0)


def current() -> PassLog | None:
    """Return the log of this process' engine: that of the running capture, else that of the flight recorder;
    None if neither notes passes.
    """
    return _kept if _current is None else _current


def keep(memory_mb: int) -> None:
    """Keep the latest passes of this process' engine from now on, between captures. Idempotent."""
    global _kept
    _kept = _kept or PassRing(memory_mb)


def kept() -> list[PassFile]:
    """Return the passes that `keep` keeps; empty before it."""
    return [] if _kept is None else [_kept.file()]


def begin(capture: EngineCapture) -> None:
    """Note the passes of this process' engine from now on, if the capture wants them."""
    global _current
    _current = PassLog(capture.passes) if capture.passes else None


def end(capture: EngineCapture | None) -> list[Artifact]:
    """End what `begin` began, and return the artifact of the passes; none if the engine noted no pass.

    Args:
        capture: The capture, or None to drop the passes.
    """
    global _current
    log, _current = _current, None
    if log is None or capture is None:
        return []
    return publish_passes(log.file(), capture)
