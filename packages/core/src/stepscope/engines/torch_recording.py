"""One capture of torch generation: its start, its iterations, and its recordings."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepscope.backends import PendingArtifact, Window, load_backend
from stepscope.config import ProfileConfig
from stepscope.engines.artifacts import publish, read_anchor
from stepscope.engines.protocol import EngineCapture
from stepscope.errors import EngineError, ours
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import safe
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.storage.recordings import compress, free_path
from stepscope.files.storage.temporary import temporary

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


class Recording:
    """One recording. States: waiting -> recording -> over. `tick` may be called from any thread, at any
    time.
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
        """Count one iteration. Raises nothing, because it runs in the user's code."""
        with self._lock:
            if by_hand:
                self._by_hand += 1
            else:
                self._by_module += 1
            self._attempt(self._follow)

    def close(self) -> None:
        """End recording. The recording so far is kept."""
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
        """Return {option of the capture: reason} for options without effect. Complete after `close`."""
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
        """Write the recordings, and return their artifacts when they are on disk.

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
        """Make a change in the user's code or on a timer. An error is kept, and `write` raises it later."""
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
