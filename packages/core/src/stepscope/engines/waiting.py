"""The wait for running requests before an engine's profiler starts: `engine.iterations.running`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from stepscope.backends.counters import CounterSource
from stepscope.engines.own_thread import own_thread
from stepscope.engines.protocol import EngineCapture, EngineProfiler
from stepscope.errors import EngineError
from stepscope.files.counters import RUNNING_REQUESTS
from stepscope.files.manifest import IDLE

LOOK_S = 0.05
"""Time between two checks of the number of running requests. A server's number is renewed once a second."""


class Waiting:
    """Waits until enough requests run, then starts an engine's profiler once."""

    def __init__(self, profiler: EngineProfiler, capture: EngineCapture, wanted: int) -> None:
        self._wanted = wanted
        self._most: int | None = None
        """Largest number of requests that were seen running at once, or None if the engine showed none."""
        self._is_open = False
        self._over = asyncio.Event()
        self._task = asyncio.ensure_future(self._start(profiler, capture))

    async def end(self) -> bool:
        """End the wait. Return whether the window has opened. If the profiler's start failed, raise the error
        of the start.
        """
        self._over.set()
        await self._task
        return self._is_open

    def why(self) -> dict[str, str]:
        """Return {`IDLE`: reason why the window did not open}, for `EngineProfiler.ignored`.

        Raises:
            EngineError: the engine does not show how many requests run.
        """
        if self._most is None:
            raise EngineError(
                f"roles.rollout.engine.iterations.running is {self._wanted}, and this engine does not show "
                "how many requests run. Fix: build it with disable_log_stats=False (vLLM) or "
                "enable_metrics=True (SGLang), or leave `running` out"
            )
        most = f"at most {self._most} requests ran at once, {self._wanted} asked for"
        return {IDLE: f"the window never opened: {most}"}

    async def _start(self, profiler: EngineProfiler, capture: EngineCapture) -> None:
        sources = await own_thread(profiler.counters)
        try:
            while not self._over.is_set():
                if await own_thread(self._look, sources):
                    self._is_open = True
                    await profiler.start(capture)
                    return
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), LOOK_S)
        finally:
            for source in sources:
                source.close()

    def _look(self, sources: Sequence[CounterSource]) -> bool:
        """Return whether enough requests run."""
        running = [source for source in sources if source.name == RUNNING_REQUESTS]
        shown = [count for source in running for count in source.sample().values()]
        if shown:
            self._most = max(self._most or 0, round(sum(shown)))
        return self._most is not None and self._most >= self._wanted
