"""The AsyncLLM's own profiler, which records the process in which the AsyncLLM lives."""

from __future__ import annotations

import asyncio
from functools import partial

from stepscope_vllm._driving.engine_calls import EngineCalls, described

_STOP_S = 60.0
"""For its trace; an event loop that has ended would never write it."""


class FrontendProfiler:
    """Profiler of one AsyncLLM's process. An LLM has none."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls

    def records(self) -> bool | None:
        """Return whether it records; None where the engine has no such profiler."""
        engine = self._calls.engine
        profiler = getattr(engine, "profiler", None) if self._calls.asynchronous else None
        if profiler is None:
            return None
        # A wrapper around a torch.profiler.profile around torch's own, or from the second on.
        while profiler is not None and not hasattr(profiler, "kineto_results"):
            profiler = getattr(profiler, "profiler", None)
        return profiler is not None and bool(profiler.entered) and profiler.kineto_results is None

    async def stop(self) -> str | None:
        """Stop it if it records, also when the engine is dead.

        A process that leaves it running ends in a segmentation fault at its exit. So does one in which a
        torch.profiler is stopped on another thread than it was started on; vLLM starts this one on a thread
        of its event loop.

        Returns:
            The reason if that failed. The other traces of the capture are still usable then.
        """
        if not self.records():
            return None
        try:
            work = self._calls.run(partial(asyncio.to_thread, self._calls.engine.profiler.stop))
            await asyncio.wait_for(work, _STOP_S)
        except asyncio.TimeoutError:
            return f"the AsyncLLM's own profiler did not stop within {_STOP_S:g} s: its trace is missing"
        except Exception as error:
            return f"the AsyncLLM's own profiler did not stop, so its trace is missing: {described(error)}"
        return None
