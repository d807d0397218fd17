"""SglangProfiler: the `EngineProfiler` of an SGLang engine in this process."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from stepscope import ProfileConfig
from stepscope.backends.counters import CounterSource
from stepscope.engines import (
    EngineCapture,
    EngineFactory,
    EngineProfiler,
    pass_socket,
    patience_s,
)
from stepscope.engines.metrics import UNFINISHED, EngineMetrics
from stepscope.engines.own_thread import users_loop
from stepscope.engines.passes import unpacked_copy
from stepscope.files.passes import PassFile
from stepscope_sglang._capture.replica import ReplicaProfiler
from stepscope_sglang._driving.in_process import (
    Engine,
    InProcessTarget,
    TokenizerManager,
    is_only_engine,
)
from stepscope_sglang._driving.target import EngineFacts, Target, counters_here


class SglangProfiler(ReplicaProfiler):
    """Profiler of an `sglang.Engine` in this process, or of the TokenizerManager that an RL framework uses.

    The engine's schedulers are other processes, and each records itself.
    """

    def __init__(self, engine: Engine | TokenizerManager, *, replica: int | None = None) -> None:
        """
        Args:
            engine: An `sglang.Engine`, a `TokenizerManager`, or an object with one as `tokenizer_manager`.
            replica: The replica's number; None for its position in `capture(engines=[...])`.
        """
        super().__init__(replica)
        self._target = InProcessTarget(engine)

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's facts. Raises EngineError if the object is not a known kind of engine."""
        return self._target.facts()

    @property
    def world_size(self) -> int:
        return self.facts.world_size

    def counters(self) -> Sequence[CounterSource]:
        """Return the engine's counters. Without `enable_metrics=True`, only the number of unfinished requests
        has values.

        If there are several engines in this process, only the counters of the engine's schedulers are read,
        because SGLang adds up the counters of all front ends in a process.
        """
        manager, facts, pids = weakref.ref(self._target.manager), self.facts, self._target.pids()

        def read() -> dict[str, float]:
            requests = getattr(manager(), "rid_to_state", None)
            unfinished = {} if requests is None else {UNFINISHED: float(len(requests))}
            # If this engine keeps no metrics, the metrics in this process belong to another engine.
            own = counters_here(None if is_only_engine() else pids) if facts.metrics else {}
            return {**own, **unfinished}

        return EngineMetrics(read, f"replica {self.replica or 0}", blocks=True).sources()

    def keep_passes(self, memory_mb: int) -> bool:
        pass_socket.ask_all(self._target.pids(), pass_socket.KEEP, memory_mb)
        return True

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        contents = pass_socket.ask_all(self._target.pids(), pass_socket.KEPT, start_ns) or ()
        return [unpacked_copy(content).file() for content in contents if content is not None]

    @contextmanager
    def _waited_for(self, capture: EngineCapture) -> Iterator[None]:
        seconds = patience_s(capture)
        until = time.monotonic() + max(seconds - 1, seconds / 2)
        self._target.waited_until = until
        try:
            yield
        finally:
            if self._target.waited_until == until:  # a later caller may have set another time
                self._target.waited_until = 0.0

    def _targets(self) -> Sequence[tuple[Target, str | None]]:
        return [(self._target, None)]

    def _prepare(self) -> None:
        self._target.find_loop(users_loop())

    def _later(self, work: Callable[[], None]) -> None:
        def when_reachable() -> None:
            if self._target.reachable:
                work()
            else:
                self._later(work)

        def submit() -> None:
            self._thread.submit(when_reachable)

        self._target.when_it_runs(submit)


class SglangFactory(EngineFactory):
    """Adapter `sglang`. Recognises engines and TokenizerManagers by the names of their classes."""

    distributions = ("sglang",)

    def recognises(self, engine: object) -> bool:
        return _is(engine, "Engine", "sglang.srt.entrypoints.") or _is_manager(engine)

    def owned(self) -> Sequence[object]:
        """Return the engines of this process; if there are none, the TokenizerManagers of a server that runs
        in this process.
        """
        if "sglang.srt.managers.tokenizer_manager" not in sys.modules:
            return ()
        alive = [value for value in gc.get_objects() if self.recognises(value)]
        engines = [value for value in alive if not _is_manager(value)]
        return sorted(engines or alive, key=_order)

    def serving(self, url: str, config: ProfileConfig) -> EngineProfiler:
        from stepscope_sglang._server import SglangServer  # imported here: only servers need it

        return SglangServer(url)

    def __call__(self, engine: object, replica: int) -> SglangProfiler:
        return SglangProfiler(cast(Engine, engine), replica=replica)


factory = SglangFactory()


def _is_manager(engine: object) -> bool:
    return _is(engine, "TokenizerManager", "sglang.srt.managers.")


def _is(engine: object, name: str, module: str) -> bool:
    # Compared by name, because this check must not import sglang. `type` is used because the `__class__` of a
    # proxy may run any code.
    return any(kind.__name__ == name and kind.__module__.startswith(module) for kind in type(engine).__mro__)


def _order(engine: object) -> tuple[int, int]:
    """Return a sort key from GPU and port, which is the same at every call."""
    args: Any = getattr(getattr(engine, "tokenizer_manager", engine), "server_args", None)
    return getattr(args, "base_gpu_id", None) or 0, getattr(args, "port", None) or 0
