"""Notes of forward passes in vLLM's engine core, the process that schedules them.

`install` adds methods to `EngineCore` that a client can call by name, and makes `EngineCore.profile` note the
passes of a server's captures. Between captures the scheduler is unchanged, unless a flight recorder has asked
to keep the latest passes.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from stepscope.engines import pass_socket, passes
from stepscope.engines.pass_socket import KEEP, KEPT
from stepscope.engines.passes import PassCopy, PassLog, PassRing
from stepscope.files.passes import PassFile, PassKind
from stepscope_vllm._engine_side.extension import dp_of

BEGIN, END = "stepscope_begin_passes", "stepscope_end_passes"
"""Names of the methods that `install` adds to `EngineCore`."""
ANSWERS = {question: f"stepscope_{question}_passes" for question in (KEEP, KEPT)}
"""{question of `pass_socket`: name of the method of `EngineCore` that answers}."""
_NOTES = "_stepscope_passes"
"""Attribute of an engine core with its `_Notes`, present while passes are noted."""
_MOST = 100_000
"""Largest number of passes in a server's capture. The request to start does not contain the wanted number."""
_CAPTURE = re.compile(r"step_\d{6,}_")
"""Beginning of the names of stepscope's captures."""
ALONE = ".passes"
"""Suffix of `profile_prefix` if a server's capture notes passes and does not run vLLM's profiler."""
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""Suffix that vLLM appends to the id of a request."""
_UPDATES = re.compile(r"(update|load|sync|receive)\w*weight|weight\w*(update|load|sync)")
"""Names of worker methods, of vLLM and of frameworks, that load new weights."""
_COMPLETION = re.compile(r"(cmpl-.+)-\d+")
"""Id of one prompt of a request to /v1/completions. The answer has the id without the number."""


def install(module: Any) -> None:
    """Change the class `EngineCore` in `module`, vLLM's `vllm.v1.engine.core`."""
    core = module.EngineCore
    if hasattr(core, BEGIN):
        return
    setattr(core, BEGIN, begin)
    setattr(core, END, end)
    setattr(core, ANSWERS[KEEP], keep)
    setattr(core, ANSWERS[KEPT], kept)
    core.profile = _with_notes(core.profile)
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        of_a_process: Any = getattr(module, name, object)
        if "run_busy_loop" in vars(of_a_process):
            of_a_process.run_busy_loop = _listening(of_a_process.run_busy_loop)


def begin(core: Any, most: int) -> None:
    """Note the passes of an engine core from now on. Earlier notes are dropped."""
    end(core)
    log = PassLog(most)
    if getattr(core, _NOTES, None) is None:
        setattr(core, _NOTES, _Notes(core, log))
    else:
        getattr(core, _NOTES).log = log


def end(core: Any) -> bytes | None:
    """End a capture's notes, and return the notes for `file_of`, or None if there are none. The call holds up
    the core for milliseconds.
    """
    notes = _ended(core)
    return None if notes is None else notes.packed()


def file_of(content: bytes) -> PassFile:
    """Return the content of a file of passes from the result of `end` or `kept`. Call `file_of` outside of
    the core's process or on another thread, because `file_of` is slow.
    """
    return passes.unpacked_copy(content).file(_named)


def _ended(core: Any) -> PassCopy | None:
    notes = getattr(core, _NOTES, None)
    if notes is None or notes.log is notes.ring:
        return None
    log, notes.log, notes.prefix = notes.log, notes.ring, None
    if notes.ring is None:
        setattr(core, _NOTES, None)
        notes.undo()
    copy: PassCopy = log.copy(dp=dp_of(core.vllm_config))
    return copy


def keep(core: Any, memory_mb: int) -> None:
    """Keep the latest passes of an engine core from now on, between captures. Idempotent."""
    notes = getattr(core, _NOTES, None)
    if notes is None:
        ring = PassRing(memory_mb)
        setattr(core, _NOTES, _Notes(core, ring))
        getattr(core, _NOTES).ring = ring
    elif notes.ring is None:
        notes.ring = PassRing(memory_mb)


def kept(core: Any, start_ns: int) -> bytes | None:
    """Return the kept passes since `start_ns` (unix ns) for `file_of`, or None if none are kept."""
    notes = getattr(core, _NOTES, None)
    if notes is None or notes.ring is None:
        return None
    copy: PassCopy = notes.ring.copy(start_ns, dp_of(core.vllm_config))
    return copy.packed()


def _listening(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `EngineCoreProc.run_busy_loop` that also answers on `pass_socket`, on a thread of
    its own.
    """

    @functools.wraps(run)
    def listening(self: Any, *args: Any, **kw: Any) -> Any:
        pass_socket.listen({KEEP: partial(keep, self), KEPT: partial(kept, self)})
        return run(self, *args, **kw)

    return listening


def _named(request: str) -> str:
    return _of_caller(_RANDOM.sub("", request))


def _with_notes(profile: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `EngineCore.profile` that also notes the passes of a server's capture, and writes
    them to the server's profiler folder.
    """

    @functools.wraps(profile)
    def noted(
        self: Any, is_start: bool = True, profile_prefix: str | None = None, *args: Any, **kw: Any
    ) -> Any:
        notes = getattr(self, _NOTES, None)
        is_free = notes is None or notes.log is notes.ring
        ours = is_start and _CAPTURE.match(profile_prefix or "") and is_free
        alone = (profile_prefix if is_start or notes is None else notes.prefix) or ""
        if not is_start:
            with suppress(Exception):  # vLLM's profiler must be stopped in any case
                _write(self)
        result = None
        if not alone.endswith(ALONE):
            result = profile(self, is_start, profile_prefix, *args, **kw)
        if ours:
            with suppress(Exception):
                begin(self, _MOST)
                getattr(self, _NOTES).prefix = profile_prefix
        return result

    return noted


def _write(core: Any) -> None:
    notes = getattr(core, _NOTES, None)
    if notes is None or notes.prefix is None:
        return
    prefix, copy = notes.prefix.removesuffix(ALONE), _ended(core)
    folder = core.vllm_config.profiler_config.torch_profiler_dir
    if copy is not None and folder:
        stem = f"{prefix}_dp{dp_of(core.vllm_config)}_{socket.gethostname()}_pid{os.getpid()}"
        passes.write_apart(copy, Path(folder), stem, _named)


class _Scheduled:
    """State of the scheduler at the moment at which a pass was scheduled."""

    __slots__ = ("began_ns", "kv_use", "running", "waiting")

    def __init__(self, scheduler: Any, began_ns: int) -> None:
        self.began_ns = began_ns
        self.running, self.waiting = scheduler.get_request_counts()
        self.kv_use = scheduler.get_kv_cache_usage()


class _Notes:
    """The notes of one engine core's passes. An instance replaces methods of the core and of its scheduler.

    The new methods run on the core's main thread, except `admit`, which runs on the core's input thread.
    """

    def __init__(self, core: Any, log: PassLog) -> None:
        self.prefix: str | None = None
        """`profile_prefix` of a server's capture, or None."""
        self.log = log
        """The log of the running capture, else `ring`."""
        self.ring: PassRing | None = None
        """The passes that are kept for the flight recorder, or None if the recorder has not asked for
        passes."""
        self._core, self._scheduler = core, core.scheduler
        self._pending: dict[int, _Scheduled] = {}
        self._ended_ns = 0
        self._schedule, self._update = core.scheduler.schedule, core.scheduler.update_from_output
        self._add, self._admit = core.scheduler.add_request, core.preprocess_add_request
        self._idle = getattr(core, "execute_dummy_batch", None)
        core.scheduler.schedule, core.scheduler.update_from_output = self.schedule, self.update
        core.scheduler.add_request, core.preprocess_add_request = self.add, self.admit
        rpc = getattr(core, "collective_rpc", None)
        if rpc is not None:
            core.collective_rpc = self._noting_updates(rpc)
        if self._idle is not None:
            core.execute_dummy_batch = self.idle

    def undo(self) -> None:
        for name in ("schedule", "update_from_output", "add_request"):
            vars(self._scheduler).pop(name, None)
        for name in ("preprocess_add_request", "execute_dummy_batch", "collective_rpc"):
            vars(self._core).pop(name, None)

    def admit(self, request: Any) -> Any:
        admitted = self._admit(request)
        known = getattr(request, "external_req_id", None) or request.request_id
        self.log.name(request.request_id, _of_caller(known))
        return admitted

    def _noting_updates(self, rpc: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rpc)  # vLLM reads the types of a request's arguments from the signature
        def noted(method: Any, *args: Any, **kw: Any) -> Any:
            results = rpc(method, *args, **kw)
            if _UPDATES.search(method if isinstance(method, str) else getattr(method, "__name__", "")):
                self.log.update()
            return results

        return noted

    def add(self, request: Any) -> Any:
        self.log.arrive(request.request_id)
        return self._add(request)

    def schedule(self, *args: Any, **kw: Any) -> Any:
        began_ns = time.monotonic_ns()
        output = self._schedule(*args, **kw)
        if output.total_num_scheduled_tokens:
            self._pending[id(output)] = _Scheduled(self._scheduler, began_ns)
        return output

    def update(self, output: Any, *args: Any, **kw: Any) -> Any:
        results = self._update(output, *args, **kw)
        scheduled = self._pending.pop(id(output), None)
        if scheduled is not None:
            ended_ns = time.monotonic_ns()
            tokens: Mapping[str, int] = output.num_scheduled_tokens
            wrote = {
                one.request_id: len(one.new_token_ids) for own in results.values() for one in own.outputs
            }
            self.log.note(
                max(scheduled.began_ns, self._ended_ns),
                ended_ns,
                _kind(output),
                tokens,
                map(wrote.get, tokens, repeat(0)),
                running=scheduled.running,
                waiting=scheduled.waiting,
                kv_use=scheduled.kv_use,
                weights=_version(self._core),
                preempted=output.preempted_req_ids or (),
            )
            self._ended_ns = ended_ns
        return results

    def idle(self) -> Any:
        began_ns = time.monotonic_ns()
        result = self._idle() if self._idle is not None else None
        self._ended_ns = time.monotonic_ns()
        running, waiting = self._scheduler.get_request_counts()
        self.log.note(began_ns, self._ended_ns, "idle", {}, (), running=running, waiting=waiting)
        return result


def _of_caller(name: str) -> str:
    completion = _COMPLETION.fullmatch(name)
    return name if completion is None else completion[1]


def _version(core: Any) -> str | None:
    """Return the version of the weights that was set in vLLM, or None if no version was set."""
    version = getattr(core, "_weight_version", None)
    return None if version in (None, "default") else str(version)


def _kind(output: Any) -> PassKind:
    if output.scheduled_spec_decode_tokens:
        return "speculative"
    requests, reads = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
    if reads == requests and not output.scheduled_new_reqs:
        return "decode"
    new = {request.req_id for request in output.scheduled_new_reqs}
    decodes = sum(
        tokens == 1 and request not in new for request, tokens in output.num_scheduled_tokens.items()
    )
    return "mixed" if decodes else "prefill"
