"""Runs an AsyncLLM whose own profiler records as well. `test_owner.py` reads the output.

Before vLLM 0.31, a second stop crashes such a process with a segmentation fault, and so does an exit during a
recording.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import stepscope_vllm
from stepscope import ProfileConfig, capture
from stepscope._recording.capture.capture import Capture


async def main(model: str, save_path: str, sizes: dict[str, Any]) -> None:
    config = ProfileConfig(
        save_path=save_path,
        steps="0:1000",
        roles={"rollout": {"ranks": "all", "engine": {"extra": {"ignore_frontend": False}}}},
        budget={"fanout_seconds": 30},
    )
    arguments = AsyncEngineArgs(model=model, **sizes, **stepscope_vllm.engine_args(config))
    llm: Any = AsyncLLM.from_engine_args(arguments)

    async with capture(1, engines=[llm], config=config) as cap:
        await generate(llm, 1)
    say("a capture", cap)

    async with capture(2, engines=[llm], config=config) as cap:
        await generate(llm, 2)
        await llm.stop_profile()
    say("somebody stops it first", cap)

    await llm.start_profile()
    async with capture(3, engines=[llm], config=config) as cap:
        await generate(llm, 3)
    await llm.stop_profile()
    say("somebody started it before", cap)

    async with capture(4, engines=[llm], config=config) as cap:
        await generate(llm, 4)
    say("a capture after all that", cap)

    async with capture(5, engines=[llm], config=config) as cap:
        await generate(llm, 5)
        llm.shutdown()
    say("shut down with a capture open", cap)


async def generate(llm: Any, number: int) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    async for _ in llm.generate("hello world", sampling, f"request-{number}"):
        pass


def say(case: str, cap: Capture) -> None:
    manifest = cap.result.manifest()
    assert manifest is not None
    (item,) = [e for part in manifest.processes for e in part.expected if e.name == "replica 0"]
    kinds = sorted(artifact.kind for artifact in item.artifacts)
    print(json.dumps({"case": case, "state": item.state, "reason": item.reason, "kinds": kinds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
