"""Calls to one engine of this process, on the engine's own event loop or thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from stepscope.engines.own_thread import WorkThread
from stepscope.errors import EngineError

_LIFE_S = 0.5
"""Interval at which stepscope checks whether an engine that does not answer is still alive."""
_NOW_S = 5.0
"""Longest wait for the answer of an engine that generates."""
TAKEN = (
    "Somebody else started its profiler, or a process that ended did. Fix: stop_profile() on the engine "
    "once, then capture"
)


class EngineCalls:
    """Calls to an `AsyncLLM` on its own event loop, or to an `LLM` on a thread of stepscope."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asynchronous = hasattr(engine, "output_handler")
        # An LLM is always called on the same thread. If its worker lives in this process, stopping a
        # torch.profiler on another thread than it was started on crashes the process.
        self._thread = WorkThread("stepscope-vllm-llm")
        self._home: asyncio.AbstractEventLoop | None = None

    def bind(self, caller: asyncio.AbstractEventLoop | None) -> None:
        """Find the event loop of an AsyncLLM. If the AsyncLLM has no loop yet, use the caller's loop.

        Args:
            caller: The event loop of the code that captures, or None for synchronous code.

        Raises:
            EngineError: the loop does not run, or there is no loop.
        """
        if not self.asynchronous:
            return
        self._home = self.loop() or caller
        if self._home is None:
            raise EngineError(
                "the AsyncLLM has no event loop yet, and this is not one for it. Fix: open the capture with "
                "`async with capture(...)` in the loop that generates, or generate once before"
            )
        if not self._home.is_running():
            raise EngineError(
                "the event loop of the AsyncLLM does not run now, so the engine cannot be called. Fix: open "
                "the capture with `async with capture(...)` inside that loop"
            )

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop of an AsyncLLM, or None before its first use."""
        resources = getattr(self.engine.engine_core, "resources", None)
        tasks = (self.engine.output_handler, getattr(resources, "output_queue_task", None))
        return next((task.get_loop() for task in tasks if task is not None), None)

    def dead(self) -> str | None:
        """Return the reason why the engine will never answer again, or None while it lives."""
        core = getattr(self.engine if self.asynchronous else self.engine.llm_engine, "engine_core", None)
        resources = getattr(core, "resources", None)
        if getattr(resources, "engine_dead", False) or (self.asynchronous and self.engine.errored):
            return "the engine is dead (its EngineCore or a worker ended)"
        return None

    async def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method of the engine.

        Raises:
            EngineError: the engine is dead, dies during the call, or raised an error. The message has the
                text of the error.
        """
        return await self._result(method, partial(getattr(self.engine, method), *args, **kwargs))

    async def ask_cores(self, method: str, *args: object) -> list[Any]:
        """Call a method of the engine's core, or of each data-parallel core. Return one result for each core.

        Raises:
            EngineError: as for `call`.
        """
        core = getattr(self.engine if self.asynchronous else self.engine.llm_engine, "engine_core", None)
        return list(await self._result(method, partial(_cores(core), method, *args)))

    def ask_cores_now(self, method: str, *args: object) -> list[Any] | None:
        """Call a method of the engine's cores while the engine generates, from a thread other than the
        engine's.

        Returns:
            The answers, or None if the engine cannot be called now because its event loop does not run.
            Always None for an LLM whose core is another process, because the sockets to that process belong
            to the thread that generates; see `pids_of_cores`.

        Raises:
            Exception: the call failed, or took longer than `_NOW_S`.
        """
        client = getattr(self.engine if self.asynchronous else self.engine.llm_engine, "engine_core", None)
        if not self.asynchronous:
            return list(_cores(client)(method, *args)) if hasattr(client, "engine_core") else None
        loop = self.loop()
        if loop is None or not loop.is_running() or self.dead() is not None:
            return None
        asked = asyncio.run_coroutine_threadsafe(_cores(client)(method, *args), loop)
        try:
            return list(asked.result(_NOW_S))
        finally:
            asked.cancel()

    def pids_of_cores(self) -> list[int]:
        """Return the process ids of an LLM's cores; empty if the cores are in this process or Ray actors."""
        resources = getattr(getattr(self.engine.llm_engine, "engine_core", None), "resources", None)
        processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
        return [process.pid for process in processes if process.pid is not None]

    async def _result(self, method: str, function: Callable[[], Any]) -> Any:
        why = self.dead()
        if why is not None:
            raise EngineError(f"{method}: {why}")
        work = asyncio.ensure_future(self.run(function))
        while not work.done():
            await asyncio.wait({work}, timeout=_LIFE_S)
            why = self.dead()
            if why is not None and not work.done():
                work.cancel()
                raise EngineError(f"{method}: {why}")
        try:
            return work.result()
        except Exception as error:
            why = await self._death() if type(error) is Exception else self.dead()
            raise EngineError(f"{method}: {why or described(error)}") from error

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the engine's loop or thread. For an AsyncLLM, also await the result."""
        if not self.asynchronous:
            return await asyncio.wrap_future(self._thread.submit(function))
        if self._home is None:
            raise EngineError("the engine's event loop is not known")

        async def at_home() -> Any:
            return await function()

        work: Coroutine[Any, Any, Any] = at_home()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    async def _death(self) -> str | None:
        """Wait up to 1 s for vLLM to mark the engine as dead, because a call may fail before vLLM does so.

        Return the reason, or None if the engine lives.
        """
        for _ in range(10):
            why = self.dead()
            if why is not None:
                return why
            await asyncio.sleep(_LIFE_S / 5)
        return None


def _cores(client: Any) -> Callable[..., Any]:
    """Return a function that calls a method of all cores behind a client, on the engine's loop or thread."""
    inner = getattr(client, "engine_core", None)
    if inner is not None:  # the engine's core is in this process
        return lambda method, *args: [getattr(inner, method)(*args)]
    if not hasattr(client, "_call_utility_async"):
        return lambda method, *args: [client.call_utility(method, *args)]

    async def ask(method: str, *args: object) -> list[Any]:
        calls = (client._call_utility_async(method, *args, engine=engine) for engine in client.core_engines)
        return await asyncio.gather(*calls)

    return ask


def described(error: BaseException) -> str:
    """Return one line about an engine's error. Text is used because the process that reads it may not have
    vLLM's exception types.
    """
    text = " ".join(str(error).split())
    hint = ""
    if type(error).__name__ == "ProfilerAlreadyActiveError":
        hint = f". {TAKEN}"
    elif "rofiling is not enabled" in text or "rofiler is not enabled" in text:
        hint = ". Fix: build it with `**stepscope_vllm.engine_args(config, replica)`"
    return f"{type(error).__name__}: {text[-400:]}{hint}"
