"""The profiler of torch generation in this process: Hugging Face `generate`, or a custom decode loop.

Generation may run on any thread, and move between threads. So the profiler records all threads, which makes
an operator take 2.2x its time during a capture, instead of 1.4x for one thread. The torch backend does the
recording and keeps its guarantees: one torch.profiler session per process, never nested, never left open.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from stepscope.backends import PendingArtifact, Window, load_backend
from stepscope.config import ProfileConfig
from stepscope.engines import passes
from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import (
    EngineCapture,
    EngineFactory,
    EngineProfilerBase,
    refuse_passes_alone,
    refuse_second_start,
)
from stepscope.errors import BackendError, EngineError, ours
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import free_path, safe
from stepscope.files.passes import PassFile
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.storage import compress, temporary

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


class Recording:
    """The recording of one capture. States: waiting -> recording -> over.

    `tick` may be called from any thread, in any state.
    """

    def __init__(
        self,
        capture: EngineCapture,
        config: ProfileConfig,
        module: Module | None,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        self.capture = capture
        self._backend = load_backend("torch", config)
        self._module = module
        self._hook: RemovableHandle | None = None
        self._process = ProcessInfo(
            role="rollout",
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            replica=capture.replica,
        )
        self._state: Literal["waiting", "recording", "over"] = "waiting"
        self._by_hand = 0
        self._by_module = 0
        self._pending: list[PendingArtifact] = []
        self._opened: ClockAnchor | None = None
        self._closed: ClockAnchor | None = None
        self._truncated: str | None = None
        self._trouble: Exception | None = None
        self._watchdog: threading.Timer | None = None
        self._lock = threading.RLock()

    @property
    def seen(self) -> int:
        """Number of engine iterations since the capture began. The loop's own calls of `iteration` take
        precedence over calls of the module.
        """
        return self._by_hand or self._by_module

    def open(self) -> None:
        """Begin recording, or begin waiting for the first wanted iteration.

        Raises:
            BackendError: torch.profiler cannot start, or another profiler records this process.
        """
        self._backend.check()
        self._backend.prepare()
        window = self.capture.iterations
        with self._lock:  # the first iteration may be over before the next line
            if self._module is not None and (window.start or window.count is not None):
                self._hook = self._module.register_forward_hook(self._on_forward)
            try:
                if window.start == 0:
                    self._begin()
            except BaseException:
                self.close()
                raise

    def tick(self, *, by_hand: bool) -> None:
        """Count one iteration. This method raises nothing, because it runs in the user's code."""
        with self._lock:
            if by_hand:
                self._by_hand += 1
            else:
                self._by_module += 1
            self._attempt(self._follow)

    def close(self) -> None:
        """End the recording, and keep what was recorded so far."""
        if self._hook is not None:
            self._hook.remove()
        with self._lock:
            if self._state == "recording":
                self._end()
            self._state = "over"

    def discard(self) -> None:
        for pending in self._pending:
            pending.discard()
        self._pending.clear()

    def ignored(self) -> dict[str, str]:
        """Return {option of the capture: reason} for options without effect. Call this after `close`."""
        reasons = {}
        for pending in self._pending:
            reasons.update({option.removeprefix("torch."): why for option, why in pending.ignored.items()})
        if self.capture.ranks is not None and self._process.rank is None:
            reasons["ranks"] = "nothing says which rank this process is. Fix: TorchRolloutProfiler(rank=...)"
        if self.capture.iterations.count is not None and self._module is None and not self._by_hand:
            reasons["iterations"] = (
                "nothing counts them here. Fix: TorchRolloutProfiler(module), or call its iteration() after "
                "each forward pass"
            )
        return reasons

    def write(self, ignored: Mapping[str, str]) -> list[Artifact]:
        """Write the recordings to disk, and return their artifacts.

        Raises:
            EngineError: nothing was recorded. The message has the reason.
            BackendError: torch could not write.
        """
        if self._trouble is not None:
            self.discard()
            raise self._trouble
        if not self._pending:
            raise EngineError(self._nothing())
        return [self._write(pending, ignored) for pending in self._pending]

    def _on_forward(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        self.tick(by_hand=False)

    def _follow(self) -> None:
        first, length = self.capture.iterations.start, self.capture.iterations.count
        if self._state == "waiting" and self.seen >= first:
            self._begin()
        elif self._state == "recording" and length is not None and self.seen >= first + length:
            self._end()

    def _begin(self) -> None:
        window = Window(step=self.capture.step, process=self._process, stage=None, index=0)
        self._backend.start(window)
        self._opened = read_anchor()
        self._state = "recording"
        if self.capture.seconds is not None:
            self._watchdog = threading.Timer(self.capture.seconds, self._out_of_time)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _end(self) -> None:
        self._state = "over"
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._closed = read_anchor()
        self._pending = self._backend.stop()

    def _out_of_time(self) -> None:
        with self._lock:
            if self._state == "recording":
                self._truncated = f"open for more than {self.capture.seconds:g} s"
                self._attempt(self._end)

    def _attempt(self, change: Callable[[], None]) -> None:
        """Call `change` in the user's code or on a timer. An error is kept, and `write` raises it later."""
        try:
            change()
        except ours() as error:
            self._state, self._trouble = "over", error

    def _nothing(self) -> str:
        window = self.capture.iterations
        return (
            f"nothing was recorded: iterations.start is {window.start}, and the capture saw {self.seen} "
            "engine iterations. Fix: a smaller start; they are counted when the profiler has the module "
            "(TorchRolloutProfiler(module)), or when the decode loop calls iteration()"
        )

    def _write(self, pending: PendingArtifact, ignored: Mapping[str, str]) -> Artifact:
        folder = Path(self.capture.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{safe(self.capture.name)}_{safe(self._process.host)}_pid{self._process.pid}"
        hidden = temporary(folder / stem)
        try:
            hidden.mkdir(mode=0o700)
            file = hidden / (stem + pending.suffix)
            pending.write(file)
            if pending.compress:
                file = compress(file)
            final = free_path(folder, stem, file.name.removeprefix(stem))
            file.rename(final)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        return publish(
            final,
            self.capture,
            kind=pending.kind,
            tool=self._backend.name,
            rank=self._process.rank,
            world_size=self._process.world_size,
            pid=self._process.pid,
            truncated=pending.truncated or self._truncated,
            ignored=ignored,
            opened=self._opened,
            closed=self._closed,
            versions=pending.versions,
            options=pending.options,
        )


T = TypeVar("T")
_EXTRA = ("with_flops",)
_UNABLE = {
    "by_stage": "torch sees forward passes and cannot tell prefill from decode",
    "merge": "one process writes one trace: there is nothing to merge",
}
_current: Recording | None = None
"""The recording of this process. One writer: `TorchRolloutProfiler`."""


def iteration() -> None:
    """Count one engine iteration (forward pass) of this process. Costs 0.1 us while nothing is recorded.

    A decode loop that does not call one `torch.nn.Module` per pass calls this function after each forward
    pass. It may call `TorchRolloutProfiler.iteration` instead, unless `RayRollout` made the profiler.
    """
    recording = _current
    if recording is not None:
        recording.tick(by_hand=True)


class TorchRolloutProfiler(EngineProfilerBase):
    """Drives torch.profiler for generation in this process. One capture at a time in a process."""

    def __init__(
        self,
        module: Module | None = None,
        *,
        replica: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """
        Args:
            module: Module whose calls are counted as engine iterations; None if the decode loop calls
                `iteration()` after each iteration.
            replica: The replica's number; None for its position in `capture(engines=[...])`.
            rank: Global rank of this process, or None if unknown.
            world_size: Number of GPUs of the replica.
        """
        super().__init__(replica)
        self._module = module
        self._rank = rank
        self._world_size = world_size
        self._recording: Recording | None = None
        # One thread does all work that may block, in order: the work of a cancelled caller is done before
        # the next start begins.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stepscope-rollout")

    @property
    def world_size(self) -> int | None:
        return self._world_size

    def iteration(self) -> None:
        """Count one engine iteration, if the profiler was made without `module`. May be called from any
        thread.
        """
        recording = self._recording
        if recording is not None:
            recording.tick(by_hand=True)

    def check(self) -> None:
        """Check that torch.profiler can run, and start it once. The first start in a process takes 1.2 to 2.5
        s.
        """
        try:
            backend = load_backend("torch", _config(("cpu",)))
            backend.check()
            backend.prepare()
        except BackendError as error:
            raise EngineError(str(error)) from error

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        refuse_passes_alone(capture)
        _config_of(capture)
        return _unable(capture)

    async def start(self, capture: EngineCapture) -> None:
        refuse_passes_alone(capture)
        refuse_second_start(None if self._recording is None else self._recording.capture)
        recording = Recording(capture, _config_of(capture), self._module, self._rank, self._world_size)
        self._recording = recording
        try:
            await self._do(partial(self._open, recording))
        except asyncio.CancelledError:
            self._recording = None
            self._thread.submit(self._drop, recording)
            raise
        except ours() as error:
            self._recording = None
            raise _as_engine_error(error) from error

    async def stop(self) -> list[Artifact]:
        recording, self._recording = self._recording, None
        if recording is None:
            return []
        try:
            # If the caller gives up, the thread still completes the file.
            return await self._do(partial(self._close, recording))
        except ours() as error:
            raise _as_engine_error(error) from error

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work))

    def keep_passes(self, memory_mb: int) -> bool:
        passes.keep(memory_mb)
        return True

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        return passes.kept(start_ns)

    # The methods below run on the profiler's thread.

    def _open(self, recording: Recording) -> None:
        global _current
        self._ignored = _unable(recording.capture)
        recording.open()
        _current = recording
        passes.begin(recording.capture)

    def _close(self, recording: Recording) -> list[Artifact]:
        self._forget(recording)
        recording.close()
        self._ignored.update(recording.ignored())
        noted = passes.end(recording.capture)
        return [*recording.write(self._ignored), *noted]

    def _drop(self, recording: Recording) -> None:
        self._forget(recording)
        passes.end(None)
        recording.close()
        recording.discard()

    def _forget(self, recording: Recording) -> None:
        global _current
        if _current is recording:
            _current = None


class TorchFactory(EngineFactory):
    """The adapter `torch`. Recognises a `torch.nn.Module`, and any object with a module as an attribute."""

    def recognises(self, engine: object) -> bool:
        return bool(_modules(engine))

    def owned(self) -> Sequence[object]:
        """Return no engine, because a process has many modules, and it is unknown which modules generate."""
        return ()

    def __call__(self, engine: object, replica: int) -> TorchRolloutProfiler:
        """Return a profiler that counts the calls of the engine's module as iterations, if the engine has
        exactly one module.
        """
        modules = _modules(engine)
        return TorchRolloutProfiler(modules[0] if len(modules) == 1 else None, replica=replica)


factory = TorchFactory()


def _modules(engine: object) -> list[Module]:
    """Return [engine] if `engine` is a module, else the modules among its attributes, each once."""
    held = [engine] if _is_module(engine) else list(getattr(engine, "__dict__", {}).values())
    return list({id(module): cast("Module", module) for module in held if _is_module(module)}.values())


def _is_module(value: object) -> bool:
    # Compared by name, because this check must not import torch.
    return any(
        kind.__name__ == "Module" and kind.__module__ == "torch.nn.modules.module"
        for kind in type(value).__mro__
    )


def _unable(capture: EngineCapture) -> dict[str, str]:
    return {option: why for option, why in _UNABLE.items() if getattr(capture, option)}


def _config_of(capture: EngineCapture) -> ProfileConfig:
    flops = capture.extra.get("with_flops", False)
    for option in capture.extra:
        if option not in _EXTRA:
            raise EngineError(f"the torch engine has no option {option!r}; it has: {', '.join(_EXTRA)}")
    return _config(
        capture.activities,
        with_stack=capture.with_stack,
        record_shapes=capture.record_shapes,
        profile_memory=capture.profile_memory,
        with_flops=bool(flops),
    )


def _config(activities: tuple[str, ...], **options: bool) -> ProfileConfig:
    return ProfileConfig(torch={"activities": activities, "all_threads": True, **options})


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    text = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
    return EngineError(text)
