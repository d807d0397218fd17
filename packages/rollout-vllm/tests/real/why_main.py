"""A program whose engine is stopped while it has requests, for `test_why_engine.py`."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from stepscope import ProfileConfig, capture, span, trajectory


async def main(model: str, save_path: str, sizes: dict[str, Any]) -> None:
    config = ProfileConfig(
        save_path=save_path, record="spans", roles={"*": {"profiler": "off"}}, control={"poll_seconds": 0.1}
    )
    engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, max_num_seqs=2, **sizes))
    async with capture(0, engines=[engine], config=config):
        await rollout(engine, 0)
    (core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert core.pid is not None
    os.kill(core.pid, signal.SIGSTOP)
    print("stopped", flush=True)
    async with capture(1, engines=[engine], config=config), span("step", role="trainer"):
        await asyncio.gather(*(rollout(engine, number) for number in range(1, 6)))


async def rollout(engine: Any, number: int) -> None:
    parameters = SamplingParams(max_tokens=50, ignore_eos=True)
    async with trajectory(f"t-{number}"), span("generate", role="rollout"):
        async for _ in engine.generate("hello", parameters, f"r-{number}"):
            pass


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
