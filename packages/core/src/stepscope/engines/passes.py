"""Notes of an engine's forward passes, and the file that contains the notes.

The code that schedules the passes (an adapter's hook, or an engine of your own) calls `PassLog`:

    log = passes.current()
    if log is not None:
        log.note(began_ns, ended_ns, "decode", {request.id: 1 for request in batch}, ...)

This is one file, because the log, its copies for other threads and the file of passes have the same columns.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec.structs import asdict

from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import EngineCapture
from stepscope.errors import RecordError
from stepscope.files import passes as records
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import free_path, safe
from stepscope.files.passes import PassFile, PassKind, Version
from stepscope.files.sidecar import Artifact
from stepscope.files.storage import write_atomic

T = TypeVar("T")
TOOL = "stepscope"
"""`Artifact.tool` of a file of passes, which stepscope writes instead of the engine's profiler."""
log = logging.getLogger("stepscope")
_KINDS: Sequence[PassKind] = get_args(PassKind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_UNKNOWN = -1.0
_current: PassLog | None = None
"""Log of the running capture for the engine of this process, or None. Writers: `begin` and `end`."""
_kept: PassRing | None = None
"""The passes that the flight recorder keeps of this process' engine between captures, or None. One writer:
`keep`."""
_PASS_BYTES, _SERVED_BYTES, _REQUEST_BYTES = 33, 12, 400
"""Memory in bytes of a pass, of each request in a pass, and of a request itself."""
_TYPES = {
    "begins": "q", "ends": "q", "kinds": "b", "kv_use": "f", "counts": "i", "running": "i", "waiting": "i",
    "requests": "i", "tokens": "i", "outputs": "i",
}  # fmt: skip
"""{column of a `_Part`: type of its array}."""
_COMING = ".passes-coming"
"""Suffix of the empty file that exists while a thread writes the file of passes."""
_COMES_S, _LOOK_S = 30.0, 0.02
"""Longest wait until a file of passes is written, and the time between two checks."""
_PART_BYTES = 1 << 20
"""Largest memory in bytes of a part of a `PassRing`. Larger parts would delay the engine, because growing
arrays are copied."""


class _Positions(dict[str, int]):
    """{id of a request: its position}. A new id gets the next position, and the caller's id for the request
    is copied from `earlier`, the callers' ids of earlier parts.
    """

    def __init__(self, callers: dict[str, str]) -> None:
        self._callers = callers
        self.earlier: Sequence[dict[str, str]] = ()

    def __missing__(self, key: str) -> int:
        self[key] = position = len(self)
        for callers in self.earlier:
            if key in callers:
                self._callers.setdefault(key, callers[key])
                break
        return position


class _Part:
    """The passes since `opened`, in columns, and the requests in these passes."""

    def __init__(self, opened: ClockAnchor) -> None:
        self.opened = opened
        self.arrived: dict[str, int] = {}
        self.callers: dict[str, str] = {}
        self.positions = _Positions(self.callers)
        self.versions: list[tuple[int, Version]] = []
        """(number of the part's passes before the change, new version of the weights), in order."""
        self.updates: list[tuple[int, int | None]] = []
        """(number of the part's passes before the change, new count of weight updates), in order."""
        self.weights: list[tuple[int, Version]] = []
        """(time by CLOCK_MONOTONIC, version of the weights from then on), in order."""
        self.begins, self.ends = array("q"), array("q")
        self.kinds, self.kv_use = array("b"), array("f")
        self.counts, self.running, self.waiting = array("i"), array("i"), array("i")
        self.requests, self.tokens, self.outputs = array("i"), array("i"), array("i")
        self.last_ids: list[str] = []
        """Ids of the requests of the last pass; `last_positions` are their positions."""
        self.last_positions = array("i")
        self.preempted: list[tuple[int, str]] = []


class PassLog:
    """The passes of one engine since the log was made. May be used from any thread.

    Args:
        most: Largest number of passes to keep. Further passes are only counted.
    """

    def __init__(self, most: int) -> None:
        self.dropped = 0
        self._most = most
        self._lock = threading.Lock()
        self._parts: Sequence[_Part] = (_Part(read_anchor()),)
        """The parts in order. New passes go to the last part. Only a `PassRing` has more than one part."""
        self._stale: Version = None
        """Version that was stated before the last `update`, or None. `note` ignores this version, because the
        new weights have another version."""

    def arrive(self, request: str, *, caller_id: str | None = None, at_ns: int | None = None) -> None:
        """Note that a request was put into the engine's queue.

        Args:
            caller_id: The id that the caller gave to the request, if it differs from the engine's id.
            at_ns: Time by CLOCK_MONOTONIC; None for now.
        """
        with self._lock:
            part = self._parts[-1]
            part.arrived[request] = time.monotonic_ns() if at_ns is None else at_ns
            part.positions[request]
        if caller_id is not None:
            self.name(request, caller_id)

    def name(self, request: str, caller_id: str) -> None:
        """Note the id that the caller gave to a request."""
        self._parts[-1].callers[request] = caller_id

    def update(self, at_ns: int | None = None) -> None:
        """Note that the engine has new weights. The version that was stated before is no longer valid.

        Args:
            at_ns: Time by CLOCK_MONOTONIC; None for now.
        """
        with self._lock:
            part = self._parts[-1]
            part.weights.append((time.monotonic_ns() if at_ns is None else at_ns, None))
            last = part.versions[-1][1] if part.versions else None
            self._stale = self._stale if last is None else last

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
            begin_ns: Begin in ns of CLOCK_MONOTONIC. `end_ns` is on the same clock.
            tokens: {id of a request: number of its tokens that the pass computed}.
            output: Number of tokens that the pass added to each request's output, in the order of `tokens`.
            kv_use: Used part of the KV cache, from 0 to 1.
            weights: Version of the weights, or None if the trainer stated no version.
            updates: Number of weight updates since the engine started, or None if unknown.
            preempted: Requests that were preempted since the pass before.
        """
        with self._lock:
            part = self._room(begin_ns)
            if part is None:
                self.dropped += 1
                return
            number = len(part.begins)
            part.begins.append(begin_ns)
            part.ends.append(end_ns)
            part.kinds.append(_CODES[kind])
            part.counts.append(len(tokens))
            part.running.append(running)
            part.waiting.append(waiting)
            part.kv_use.append(_UNKNOWN if kv_use is None else kv_use)
            ids = list(tokens)
            if ids != part.last_ids:  # a batch that decodes stays the same for many passes
                part.last_ids = ids
                part.last_positions = array("i", list(map(part.positions.__getitem__, ids)))
            part.requests.extend(part.last_positions)
            # `extend` with a list would grow the array once for each number.
            part.tokens.fromlist(list(tokens.values()))
            part.outputs.fromlist(list(output))
            part.preempted += [(number, request) for request in preempted]
            weights = None if weights == self._stale else weights
            if weights != (part.versions[-1][1] if part.versions else None):
                part.versions.append((number, weights))
                if weights is not None:  # else `update` has recorded the time of the change
                    part.weights.append((begin_ns, weights))
            if updates != (part.updates[-1][1] if part.updates else None):
                part.updates.append((number, updates))

    def _room(self, begin_ns: int) -> _Part | None:
        """Return the part for the next pass, or None if the log has no room."""
        part = self._parts[-1]
        return part if len(part.begins) < self._most else None

    def copy(self, since_ns: int = 0, dp: int = 0) -> PassCopy:
        """Return a copy of all passes so far. The columns are copied as they are, so the engine waits only
        for milliseconds.

        Args:
            since_ns: Unix ns. Passes before this time may be left out, except passes of requests that also
                ran later.
            dp: Number of the data-parallel engine.
        """
        with self._lock:
            closed = read_anchor()
            parts = self._parts[self._first_since(since_ns + closed.mono_ns - closed.wall_ns) :]
            copies = [_copied(part) for part in parts]
            older = self._parts[: -len(parts)]
            copies[0].weights[:0] = [one for part in older for one in part.weights]
            host = socket.gethostname()
        return PassCopy(parts=copies, dropped=self.dropped, closed=closed, dp=dp, host=host)

    def _first_since(self, since_ns: int) -> int:
        """Return the index of the first part to copy: the part at `since_ns`, or an earlier part that shares
        a request with the parts from there on.
        """
        parts = self._parts
        first = max(0, bisect_right([part.opened.mono_ns for part in parts], since_ns) - 1)
        names = {name for part in parts[first:] for name in part.positions} if first else set[str]()
        return next((at for at in range(first) if not names.isdisjoint(parts[at].positions)), first)

    def file(self, dp: int = 0) -> PassFile:
        """Return all passes so far, as the content of a file. `publish_passes` adds the step and run."""
        return self.copy(dp=dp).file()


class _PartCopy(msgspec.Struct):
    """A copy of a `_Part`. `columns` are the bytes of its arrays."""

    opened: ClockAnchor
    ids: list[str]
    arrived: dict[str, int]
    callers: dict[str, str]
    versions: list[tuple[int, Version]]
    updates: list[tuple[int, int | None]]
    weights: list[tuple[int, Version]]
    preempted: list[tuple[int, str]]
    columns: dict[str, bytes]


def _copied(part: _Part) -> _PartCopy:
    return _PartCopy(
        opened=part.opened,
        ids=list(part.positions),
        arrived=dict(part.arrived),
        callers=dict(part.callers),
        versions=list(part.versions),
        updates=list(part.updates),
        weights=list(part.weights),
        preempted=list(part.preempted),
        columns={name: getattr(part, name).tobytes() for name in _TYPES},
    )


class PassCopy(msgspec.Struct):
    """A copy of a log, from which another thread or process makes the file."""

    parts: list[_PartCopy]
    dropped: int
    closed: ClockAnchor
    dp: int
    host: str

    def packed(self) -> bytes:
        """Return the copy as bytes, for `unpacked_copy` in another process."""
        return msgspec.msgpack.encode(self)

    def file(self, caller_of: Callable[[str], str] | None = None) -> PassFile:
        """Return the content of a file.

        Args:
            caller_of: Returns the caller's id for a request's own id. Called for requests whose caller's id
                was not noted.
        """
        positions, preempted = _Positions({}), list[tuple[int, str]]()
        passes = {name: list[Any]() for name in records.Passes.__struct_fields__}
        served = {name: list[int]() for name in records.Served.__struct_fields__}
        versions, updates = list[tuple[int, Version]](), list[tuple[int, int | None]]()
        for part in self.parts:
            first = len(passes["begin_ns"])
            at = [positions[request] for request in part.ids]
            column = {name: array(code, part.columns[name]) for name, code in _TYPES.items()}
            passes["begin_ns"] += column["begins"]
            passes["end_ns"] += column["ends"]
            passes["kind"] += map(_KINDS.__getitem__, column["kinds"])
            passes["requests"] += column["counts"]
            passes["running"] += column["running"]
            passes["waiting"] += column["waiting"]
            passes["kv_use"] += [None if use < 0 else round(use, 4) for use in column["kv_use"]]
            served["request"] += map(at.__getitem__, column["requests"])
            served["tokens"] += column["tokens"]
            served["output"] += column["outputs"]
            preempted += [(first + number, name) for number, name in part.preempted]
            versions += [(first + number, version) for number, version in part.versions]
            updates += [(first + number, count) for number, count in part.updates]
        passes["number"] = list(range(len(passes["begin_ns"])))
        lost = records.Preempted(
            number=[number for number, _ in preempted], request=[positions[name] for _, name in preempted]
        )
        ids = list(positions)
        arrived = _merged([part.arrived for part in self.parts])
        callers = _merged([part.callers for part in self.parts])
        if caller_of is not None:
            callers.update({own: caller_of(own) for own in ids if own not in callers})
        rows_before = list(accumulate(passes["requests"], initial=0))
        begun, ended = _at_ends(versions, None, len(ids), rows_before, served["request"])
        updates_begun, updates_ended = _at_ends(updates, None, len(ids), rows_before, served["request"])
        weights = [one for part in self.parts for one in part.weights]
        return PassFile(
            step=0,
            run_id="",
            replica=0,
            dp=self.dp,
            host=self.host,
            anchor=self.parts[0].opened,
            closed=self.closed,
            dropped=self.dropped,
            requests=records.Requests(
                id=ids,
                caller_id=[
                    None if caller == own else caller
                    for own, caller in zip(ids, map(callers.get, ids), strict=True)
                ],
                arrived_ns=list(map(arrived.get, ids)),
                version_begun=begun,
                version_ended=ended,
                updates_begun=updates_begun,
                updates_ended=updates_ended,
            ),
            passes=records.Passes(**passes),
            served=records.Served(**served),
            preempted=lost,
            weights=records.Weights(
                at_ns=[at_ns for at_ns, _ in weights], version=[version for _, version in weights]
            ),
        )


def unpacked_copy(content: bytes) -> PassCopy:
    """Return the copy that `PassCopy.packed` packed.

    Raises:
        RecordError: another version of stepscope packed it.
    """
    try:
        return msgspec.msgpack.decode(content, type=PassCopy)
    except msgspec.MsgspecError as error:
        raise RecordError(f"it is no copy of passes: {error}") from None


class PassRing(PassLog):
    """The latest passes of one engine, in parts. The oldest part is dropped when the parts together take
    `memory_mb`.
    """

    def __init__(self, memory_mb: int) -> None:
        super().__init__(0)
        self._bytes = min(_PART_BYTES, memory_mb << 19)
        self._most_parts = (memory_mb << 20) // self._bytes

    def _room(self, begin_ns: int) -> _Part:
        last = self._parts[-1]
        size = len(last.begins) * _PASS_BYTES + len(last.requests) * _SERVED_BYTES
        if size + len(last.positions) * _REQUEST_BYTES <= self._bytes:
            return last
        now = read_anchor()
        opened_ns = now.wall_ns - now.mono_ns + begin_ns
        part = _Part(msgspec.structs.replace(now, wall_ns=opened_ns, mono_ns=begin_ns))
        kept = self._parts[1 - self._most_parts :]
        part.positions.earlier = [one.callers for one in reversed(kept)]
        last.positions.earlier = ()  # else it would keep dropped parts in memory
        part.versions = [(0, version) for _, version in last.versions[-1:]]
        part.updates = [(0, count) for _, count in last.updates[-1:]]
        # `last` has the requests and weights that came while the pass ran. They are copied to the new part,
        # because `last` is dropped first.
        for request, at_ns in takewhile(lambda one: one[1] >= begin_ns, reversed(last.arrived.items())):
            part.arrived[request] = at_ns
            part.positions[request]
        part.weights = [one for one in last.weights if one[0] >= begin_ns]
        last.weights = [one for one in last.weights if one[0] < begin_ns]
        self._parts = (*kept, part)
        return part


def _merged(parts: Iterable[dict[str, T]]) -> dict[str, T]:
    merged: dict[str, T] = {}
    for part in parts:
        merged.update(part)
    return merged


def _at_ends(
    changes: Sequence[tuple[int, T]], before: T, known: int, rows: Sequence[int], served: Sequence[int]
) -> tuple[list[T], list[T]]:
    """Return the values at the first and at the last pass of each request.

    Args:
        changes: (number of passes before the change, new value), in order.
        before: The value before the first change.
        known: Number of requests.
        rows: Number of rows of `served` before each pass, and at the end the number of all rows.
        served: For each row, the position of its request.
    """
    begun: dict[int, T] = {}
    ended = [before] * known
    bounds = [(0, before), *((rows[first], value) for first, value in changes), (rows[-1], before)]
    for (first, value), (last, _) in pairwise(bounds):
        for request in set(served[first:last]):
            begun.setdefault(request, value)
            ended[request] = value
    return [begun.get(request, before) for request in range(known)], ended


def between(file: PassFile, start_ns: int, end_ns: int) -> PassFile:
    """Return the passes that ran between two times, and the requests that ran or arrived in that time.

    Args:
        start_ns: Time in unix ns of the engine's host. `end_ns` is on the same clock.
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
    from isal import igzip  # imported here: 9 ms, and only the end of a capture needs it

    packed: bytes = igzip.compress(msgspec.json.encode(file), 1)
    return packed


def write(content: bytes, folder: Path, stem: str) -> Path:
    """Write the bytes of a file of passes, under a name that begins with `stem`, and return its path."""
    path = free_path(folder, stem, records.SUFFIX)
    write_atomic(path, content)
    return path


def write_apart(
    copy: PassCopy, folder: Path, stem: str, caller_of: Callable[[str], str] | None = None
) -> None:
    """Write a file of passes for `take`. A new thread writes, because writing 20,000 passes would delay the
    engine by 0.1 s.
    """
    coming = folder / f"{stem}{_COMING}"

    def make() -> None:
        try:
            write(encoded(copy.file(caller_of)), folder, stem)
        finally:
            coming.unlink(missing_ok=True)

    folder.mkdir(parents=True, exist_ok=True)  # vLLM makes the folder only for its first trace
    coming.touch()
    threading.Thread(target=make, name="stepscope-passes-file").start()


def take(folder: Path, stems: str) -> list[PassFile]:
    """Return the files of passes in `folder` whose names match `stems`, ordered by name, and remove them.
    Files that are being written are awaited. Damaged files are logged and left out.

    Args:
        stems: Glob pattern of the names without their suffix.
    """
    until = time.monotonic() + _COMES_S
    while any(folder.glob(f"{stems}{_COMING}")) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    found = []
    for path in sorted(folder.glob(f"{stems}{records.SUFFIX}")):
        try:
            found.append(records.read_passes(path))
        except (OSError, RecordError) as error:
            log.warning("stepscope: the engine's notes of forward passes are lost: %s: %s", path, error)
        path.unlink(missing_ok=True)
    return found


def publish_passes(file: PassFile, capture: EngineCapture) -> list[Artifact]:
    """Write the passes of an engine into the capture's folder, and return the artifact; empty if there are no
    passes.
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
    """Return a file with only the first `most` passes. The other passes are added to `dropped`."""
    lost = len(file.passes.number) - most
    if lost <= 0:
        return file
    return msgspec.structs.replace(_rows(file, 0, most), dropped=file.dropped + lost)


def _rows(file: PassFile, first: int, last: int) -> PassFile:
    """Return a file with the passes from index `first` up to `last`, and with all requests."""
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
    """Return the log that this process' engine writes to: the running capture's, else the flight recorder's.
    Return None if there is no log.
    """
    return _kept if _current is None else _current


def keep(memory_mb: int) -> None:
    """Keep the latest passes of this process' engine between captures, from now on. Idempotent."""
    global _kept
    _kept = _kept or PassRing(memory_mb)


def kept(start_ns: int) -> list[PassFile]:
    """Return a list of one file with the kept passes since `start_ns` (unix ns); empty before the first call
    of `keep`.
    """
    return [] if _kept is None else [_kept.copy(start_ns).file()]


def begin(capture: EngineCapture) -> None:
    """Note the passes of this process' engine from now on, if `capture.passes` is not 0."""
    global _current
    _current = PassLog(capture.passes) if capture.passes else None


def end(capture: EngineCapture | None) -> list[Artifact]:
    """End what `begin` began, and return the artifact of the passes; empty if the engine noted no pass.

    Args:
        capture: The capture, or None to drop the passes.
    """
    global _current
    log, _current = _current, None
    if log is None or capture is None:
        return []
    return publish_passes(log.file(), capture)
