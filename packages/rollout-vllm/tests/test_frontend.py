"""The AsyncLLM's own profiler, where it does not stop: the capture goes on and says what is missing.

A stand-in has an AsyncLLM's attributes; the real one's profiler cannot be made to fail on demand.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from stepscope_vllm._driving.engine_calls import EngineCalls
from stepscope_vllm._driving.in_process import stop_frontend


class Frontend:
    """A stand-in for the torch session of `AsyncLLM.profiler`: it records, and its stop raises."""

    kineto_results = None
    entered = True

    def stop(self) -> None:
        raise OSError(28, "No space left on device")


def stopped(profiler: object) -> str | None:
    async def work() -> str | None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        engine = SimpleNamespace(
            output_handler=task,
            vllm_config=None,
            errored=False,
            engine_core=SimpleNamespace(resources=None),
            profiler=SimpleNamespace(profiler=profiler, stop=getattr(profiler, "stop", None)),
        )
        calls = EngineCalls(engine)
        calls.bind(asyncio.get_running_loop())
        try:
            return await stop_frontend(calls)
        finally:
            task.cancel()

    return asyncio.run(work())


def test_a_frontend_that_does_not_stop_is_named_with_its_reason() -> None:
    reason = str(stopped(Frontend()))
    assert "AsyncLLM's own" in reason
    assert "No space left" in reason


def test_of_a_frontend_that_does_not_record_nothing_is_said() -> None:
    idle = Frontend()
    idle.entered = False
    assert stopped(idle) is None
