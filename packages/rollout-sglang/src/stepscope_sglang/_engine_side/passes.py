"""Notes of forward passes in SGLang's schedulers, for captures and for the flight recorder.

A capture asks for notes by the file `ASK` in its folder, because SGLang's request has no field for notes. The
notes go on after the profile has reached its count. The notes end when the scheduler is asked for its state
and finds the file `END`. The flight recorder asks over a socket (`stepscope.engines.pass_socket`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engines import passes
from stepscope.engines.passes import PassLog, PassRing
from stepscope.files.passes import PassKind

ASK, END = ".stepscope-passes", ".stepscope-passes-end"
"""Names of files in a capture's folder. `ASK` contains the number of passes to note. `END` marks the end of
the capture."""
SCRAP = "-scrap"
"""Suffix of the folder of the short recording that replaces a waiting start (`_capture.session`)."""
ALONE = ".stepscope-passes-alone"
"""Name of a file in a capture's folder that keeps the profile from beginning."""
_SCHEDULER = "sglang.srt.managers.scheduler"
_notes: Notes | None = None
"""The notes of this process' scheduler, or None. Writers: `_note` and `_leave`."""
_ring: PassRing | None = None
"""The passes that are kept for the flight recorder, or None if the recorder has not asked for passes. One
writer: `keep`."""
_lock = threading.Lock()
"""Lock that is held while notes begin and end, because `keep` does not run on the scheduler's thread."""


class _Weights:
    """The weight updates of this process' scheduler since the scheduler was made."""

    def __init__(self) -> None:
        self.updates = 0
        self._at_pass: int | None = None
        self._stale: str | None = None
        """Version of the old weights if SGLang still states this version after the last update, or None."""

    def update(self, at_pass: int, stated: str | None) -> None:
        """Count an update. Several updates without a forward pass in between, such as one for each bucket of
        weights, count as one.

        Args:
            at_pass: Number of passes that the scheduler has begun.
            stated: Version of the weights in the request for the update, or None.
        """
        self.updates += at_pass != self._at_pass
        self._at_pass = at_pass
        self._stale = _stated() if stated is None else None

    def version(self) -> str | None:
        """Return the version that SGLang states for its weights. Return None if there is no version, or if
        the stated version is older than the last update.
        """
        version = _stated()
        return None if version == self._stale else version


_weights = _Weights()


def update(scheduler: Any, request: Any) -> None:
    """Count an update of the weights that SGLang has made because of `request`."""
    _weights.update(scheduler.forward_ct, getattr(request, "weight_version", None))
    if _notes is not None:
        _notes.log.update()


def begin(scheduler: Any, folder: Path) -> None:
    """Note the passes of a scheduler for the capture of a folder, if the capture asks for notes.

    Earlier notes are dropped. But if the folder belongs to a short recording that replaces a waiting start,
    the capture's notes go on.
    """
    if _notes is not None and _notes.folder is not None and folder.name == f"{_notes.folder.name}{SCRAP}":
        return
    with _lock:
        _leave()
        with suppress(OSError, ValueError):  # the capture does not ask for notes
            most = int((folder / ASK).read_text())
            if _is_first(scheduler):
                _note(scheduler, PassLog(most), folder)


def end() -> None:
    """Write the notes of a capture on a thread, if the capture has ended."""
    notes = _notes
    if notes is None or notes.folder is None or not (notes.folder / END).exists():
        return
    with _lock:
        folder, log = notes.folder, notes.log
        _leave()
    dp = _number(notes.scheduler, "dp_rank")
    stem = f"passes-dp{dp}-{socket.gethostname()}-pid{os.getpid()}"
    passes.write_apart(log.copy(dp=dp), folder, stem)


def _note(scheduler: Any, log: PassLog, folder: Path | None) -> None:
    """Note passes in `log` from now on. Called on the scheduler's thread."""
    global _notes
    _notes = _notes or Notes(scheduler, log)
    _notes.log, _notes.folder = log, folder


def _leave() -> None:
    """End the notes of a capture, if there are any. Notes for the flight recorder go on."""
    global _notes
    if _notes is not None and _ring is not None:
        _notes.log, _notes.folder = _ring, None
    elif _notes is not None:
        _notes.undo()
        _notes = None


def keep(scheduler: Any, memory_mb: int) -> None:
    """Keep the latest passes of a scheduler from its next pass on, between captures. Idempotent."""
    global _ring
    with _lock:
        if _ring is None:
            _ring = PassRing(memory_mb)
            if _notes is None:  # else a capture notes passes, and `_leave` goes on with the ring
                scheduler.run_batch = partial(_run_first, scheduler, _ring, scheduler.run_batch)


def _run_first(scheduler: Any, ring: PassRing, run: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Begin the notes, and run the first noted pass. Notes begin on the scheduler's thread, because only this
    thread can count the passes whose results are still to come.
    """
    with _lock, suppress(Exception):  # another version may have other attributes
        vars(scheduler).pop("run_batch", None)
        if _notes is None and _is_first(scheduler):
            _note(scheduler, ring, None)
            run = scheduler.run_batch
    return run(*args, **kw)


def kept(scheduler: Any, start_ns: int) -> bytes | None:
    """Return a packed copy of the kept passes since `start_ns` (unix ns), or None if none are kept."""
    if _ring is None or not _is_first(scheduler):
        return None
    return _ring.copy(start_ns, _number(scheduler, "dp_rank")).packed()


def are_alone(folder: Path) -> bool:
    """Return whether the capture of a folder wants passes without a profile."""
    return (folder / ALONE).exists()


def _is_first(scheduler: Any) -> bool:
    """Return whether this scheduler notes the passes of its engine. One scheduler is enough, because all
    tensor and pipeline ranks run the same passes.
    """
    return not any(_number(scheduler, name) for name in ("attn_tp_rank", "attn_cp_rank", "pp_rank"))


def _number(scheduler: Any, name: str) -> int:
    """Return a rank of a scheduler, which versions of SGLang keep in different places. 0 if the scheduler has
    no such rank.
    """
    for holder in (scheduler, getattr(scheduler, "ps", None), getattr(scheduler, "server_args", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return 0


class _Launched(NamedTuple):
    """A pass that was launched, and whose results are still to be processed."""

    began_ns: int
    kind: PassKind
    tokens: dict[str, int]
    running: int
    waiting: int
    kv_use: float | None
    version: str | None
    updates: int


class Notes:
    """The notes of a scheduler's passes. An instance replaces methods of the scheduler. The new methods run
    on the scheduler's thread.
    """

    def __init__(self, scheduler: Any, log: PassLog) -> None:
        self.scheduler, self.log = scheduler, log
        self.folder: Path | None = None
        """Folder of the capture that wants the notes, or None between captures."""
        self._launched: deque[_Launched | None] = deque()
        self._retracted: list[str] = []
        self._ended_ns = 0
        vars(scheduler).pop("run_batch", None)  # remove `_run_first`
        self._run, self._process = scheduler.run_batch, scheduler.process_batch_result
        self._enqueue = scheduler._add_request_to_queue
        # In an overlapped loop, the results of earlier passes are still to come.
        self._launched.extend(None for _ in getattr(scheduler, "result_queue", ()))
        scheduler.run_batch, scheduler.process_batch_result = self.run, self.process
        scheduler._add_request_to_queue = self.enqueue

    def undo(self) -> None:
        for name in ("run_batch", "process_batch_result", "_add_request_to_queue"):
            vars(self.scheduler).pop(name, None)

    def enqueue(self, request: Any, is_retracted: bool = False, *args: Any, **kw: Any) -> Any:
        if is_retracted:
            self._retracted.append(request.rid)
        else:
            self.log.arrive(request.rid)
        return self._enqueue(request, is_retracted, *args, **kw)

    def run(self, batch: Any, *args: Any, **kw: Any) -> Any:
        with suppress(Exception):  # another version may have other attributes; an error kills the scheduler
            self._launched.append(self._launch(batch))
        return self._run(batch, *args, **kw)

    def _launch(self, batch: Any) -> _Launched:
        mode = batch.forward_mode
        requests: Sequence[Any] = batch.reqs
        lengths = batch.extend_lens if mode.is_extend() else None
        counts = lengths if lengths is not None and len(lengths) == len(requests) else [1] * len(requests)
        return _Launched(
            time.monotonic_ns(),
            _kind(batch),
            {request.rid: int(tokens) for request, tokens in zip(requests, counts, strict=True)},
            max(len(self.scheduler.running_batch.reqs), len(requests)),
            len(self.scheduler.waiting_queue),
            _kv_use(self.scheduler),
            _weights.version(),
            _weights.updates,
        )

    def process(self, batch: Any, *args: Any, **kw: Any) -> Any:
        requests = list(batch.reqs)
        before = [len(request.output_ids) for request in requests]
        result = self._process(batch, *args, **kw)
        with suppress(Exception):  # another version may have other attributes; an error kills the scheduler
            launched = self._launched.popleft() if self._launched else None
            if launched is not None:
                self._note(launched, requests, before)
        return result

    def _note(self, launched: _Launched, requests: Sequence[Any], before: Sequence[int]) -> None:
        wrote = {
            request.rid: len(request.output_ids) - count
            for request, count in zip(requests, before, strict=True)
        }
        began_ns, ended_ns = max(launched.began_ns, self._ended_ns), time.monotonic_ns()
        retracted, self._retracted = self._retracted, []
        self.log.note(
            began_ns,
            ended_ns,
            launched.kind,
            launched.tokens,
            [wrote.get(request, 0) for request in launched.tokens],
            running=launched.running,
            waiting=launched.waiting,
            kv_use=launched.kv_use,
            weights=launched.version,
            updates=launched.updates,
            preempted=retracted,
        )
        self._ended_ns = ended_ns


def _stated() -> str | None:
    """Return the version of the weights that was set in SGLang (from 0.5.23 on), or None if none was set."""
    with suppress(Exception):  # earlier versions keep the version in another process
        version = sys.modules[_SCHEDULER].get_serving().weight_version
        return None if version in (None, "default") else str(version)
    return None


def _kind(batch: Any) -> PassKind:
    mode = batch.forward_mode
    if mode.is_idle():
        return "idle"
    if mode.is_target_verify() or (not batch.spec_algorithm.is_none() and mode.is_decode()):
        return "speculative"
    if mode.is_mixed():
        return "mixed"
    return "prefill" if mode.is_extend() else "decode"


def _kv_use(scheduler: Any) -> float | None:
    """Return the fraction of the KV cache that running requests use, without prefixes that are only cached;
    None if unknown.
    """
    with suppress(Exception):  # hybrid models have several pools
        total = scheduler.max_total_num_tokens
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return float(min(1.0, max(0.0, 1 - free / total)))
    return None
