"""Notes of an engine's forward passes during a capture, and the file of them.

Code in the process that schedules the passes calls `PassLog`: an adapter's hook, or an engine of your own:

    log = passes.current()
    if log is not None:
        log.note(began_ns, ended_ns, "decode", {request.id: 1 for request in batch}, ...)
"""

from __future__ import annotations

import os
import socket
import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import get_args

import msgspec

from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import EngineCapture
from stepscope.files import passes as records
from stepscope.files.layout import safe
from stepscope.files.passes import PassFile, PassKind, Version
from stepscope.files.sidecar import Artifact
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.recordings import free_path

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
        self._begins, self._ends = array("q"), array("q")
        self._kinds, self._kv_use = array("b"), array("f")
        self._counts, self._running, self._waiting = array("l"), array("l"), array("l")
        self._requests, self._tokens, self._outputs = array("l"), array("l"), array("l")
        self._preempted: list[tuple[int, str]] = []

    def arrive(self, request: str, *, caller_id: str | None = None, at_ns: int | None = None) -> None:
        """Note that a request was put into the engine's queue.

        Args:
            caller_id: The id under which the caller knows the request, if it differs.
            at_ns: Time by CLOCK_MONOTONIC; None for now.
        """
        with self._lock:
            self._arrived[request] = time.monotonic_ns() if at_ns is None else at_ns
            self._positions[request]
            if caller_id is not None and caller_id != request:
                self._callers[request] = caller_id

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
        preempted: Iterable[str] = (),
    ) -> None:
        """Note one forward pass.

        Args:
            begin_ns: Begin by CLOCK_MONOTONIC. `end_ns` likewise.
            tokens: {id of a request: number of its tokens that the pass computed}.
            output: The tokens that the pass added to each request's output, in the order of `tokens`.
            kv_use: Used part of the KV cache, from 0 to 1.
            weights: Version of the weights.
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
            if weights != (self._versions[-1][1] if self._versions else None):
                self._versions.append((number, weights))

    def file(self, *, step: int, run_id: str, replica: int, dp: int = 0) -> PassFile:
        """Return all passes so far, as the content of a file."""
        with self._lock:
            number, request = zip(*self._preempted, strict=True) if self._preempted else ((), ())
            preempted = records.Preempted(
                number=list(number), request=[self._positions[one] for one in request]
            )
            ids = list(self._positions)
            begun, ended = self._versions_of(len(ids))
            return PassFile(
                step=step,
                run_id=run_id,
                replica=replica,
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
            )

    def _versions_of(self, requests: int) -> tuple[list[Version], list[Version]]:
        """Return the versions of the weights at the first and at the last pass of each request."""
        begun: list[Version] = [None] * requests
        ended: list[Version] = [None] * requests
        rows = list(accumulate(self._counts, initial=0))
        bounds = [(rows[first], version) for first, version in self._versions]
        for (first, version), (last, _) in pairwise([*bounds, (rows[-1], None)]):
            for request in set(self._requests[first:last]):
                begun[request] = version if begun[request] is None else begun[request]
                ended[request] = version
        return begun, ended


def write(file: PassFile, folder: Path, stem: str) -> Path:
    """Write a file of passes to a folder, under a name that begins with `stem`, and return its path."""
    from isal import igzip  # import time: 9 ms, for the end of a capture alone

    path = free_path(folder, stem, records.SUFFIX)
    write_atomic(path, igzip.compress(msgspec.json.encode(file), 1))
    return path


def publish_passes(path: Path, capture: EngineCapture, *, tool: str, dp: int | None = None) -> Artifact:
    """Return the artifact of a file of passes that lies below the capture's folder, with its sidecar."""
    file = records.read_passes(path)
    return publish(
        path,
        capture,
        kind=records.KIND,
        tool=tool,
        topology=None if dp is None else {"dp": dp},
        host=file.host,
        truncated=f"more than {len(file.passes.number)} passes" if file.dropped else None,
        opened=file.anchor,
        closed=file.closed,
        iterations=len(file.passes.number),
    )


def current() -> PassLog | None:
    """Return the log of this process' engine while a capture notes its passes, else None."""
    return _current


def begin(capture: EngineCapture) -> None:
    """Note the passes of this process' engine from now on, if the capture wants them."""
    global _current
    _current = PassLog(capture.passes) if capture.passes else None


def end(capture: EngineCapture | None, tool: str) -> list[Artifact]:
    """End what `begin` began, and return the artifact of the passes; none if the engine noted no pass.

    Args:
        capture: The capture, or None to drop the passes.
    """
    global _current
    log, _current = _current, None
    if log is None or capture is None:
        return []
    file = log.file(step=capture.step, run_id=capture.run_id, replica=capture.replica)
    if not file.passes.number:
        return []
    stem = f"{safe(capture.name)}_{safe(file.host)}_pid{os.getpid()}"
    return [publish_passes(write(file, Path(capture.out_dir), stem), capture, tool=tool)]
