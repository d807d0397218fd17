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
"""The log that the engine of this process writes to, or None. One writer: `begin` and `end`."""


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
        if caller_id != request:
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
    def requests(self) -> list[str]:
        """Return the ids of the requests that arrived or were served so far."""
        return list(self._positions)

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
            number = len(self._begins)
            if number >= self._most:
                self.dropped += 1
                return
            self._begins.append(begin_ns)
            self._ends.append(end_ns)
            self._kinds.append(_CODES[kind])
            self._counts.append(len(tokens))
            self._running.append(running)
            self._waiting.append(waiting)
            self._kv_use.append(_UNKNOWN if kv_use is None else kv_use)
            self._requests.extend(map(self._positions.__getitem__, tokens))
            self._tokens.extend(tokens.values())
            self._outputs.extend(output)
            self._preempted += [(number, request) for request in preempted]
            weights = None if weights == self._stale else weights
            if weights != (self._versions[-1][1] if self._versions else None):
                self._versions.append((number, weights))
                if weights is not None:  # else `update` has the time of the change
                    self._weights.append((begin_ns, weights))
            if updates != (self._updates[-1][1] if self._updates else None):
                self._updates.append((number, updates))

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
                    caller_id=list(map(self._callers.get, ids)),
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
    passes, served, lost = file.passes, file.served, len(file.passes.number) - most
    if lost <= 0:
        return file
    rows = sum(passes.requests[:most])
    return msgspec.structs.replace(
        file,
        dropped=file.dropped + lost,
        passes=records.Passes(**{name: column[:most] for name, column in asdict(passes).items()}),
        served=records.Served(**{name: column[:rows] for name, column in asdict(served).items()}),
    )


def current() -> PassLog | None:
    """Return the log of this process' engine while a capture notes its passes, else None."""
    return _current


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
