"""One engine of `test_vllm_more.py`, in a process of its own; prints a line of JSON for all that it saw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import stepscope_vllm
from stepscope import ProfileConfig, capture
from stepscope.files.late import waiting
from stepscope.files.layout import RunLayout
from stepscope.recording.capture import Capture
from stepscope_vllm import VllmProfiler

_requests = 0


async def layout(llm: Any, save_path: str, size: int) -> None:
    """All workers of one replica, then of the third replica its last rank and one of another's."""
    if size > 1 and "pipeline" in sys.argv[1]:
        await llm.collective_rpc("fill_pipeline")
    await generate(llm)
    for step, replica, ranks in ((1, 0, "all"), (2, 2, [0, 3 * size - 1])):
        config, profiler = of(save_path, ranks), VllmProfiler(llm, replica=replica)
        async with capture(step, engines=[profiler], config=config) as cap:
            await generate(llm)
        say(f"ranks {ranks}", cap, replica)
    core = core_of(llm)
    os.kill(core, signal.SIGKILL)
    await until(lambda: ended(core))
    began = time.monotonic()
    async with capture(3, engines=[llm], config=of(save_path, "all")) as cap:
        pass
    say("its core was killed before the capture", cap, took_s=time.monotonic() - began)


async def trouble(llm: Any, save_path: str) -> None:
    config = of(save_path, "all", budget={"fanout_seconds": 5})
    await generate(llm)
    async with capture(1, engines=[llm], config=config) as cap:
        await generate(llm)
    worker = say("nothing is wrong", cap)

    began = time.monotonic()
    async with capture(2, engines=[llm], config=config) as cap:
        await generate(llm)
        os.kill(worker, signal.SIGSTOP)
    say("its worker is frozen in the stop", cap, took_s=time.monotonic() - began)
    os.kill(worker, signal.SIGCONT)
    await until(lambda: not waiting(RunLayout(save_path).step(2)))
    say("its worker goes on", cap)

    limited = of(save_path, "all", torch={"with_stack": True}, budget={"seconds": 0.3, "fanout_seconds": 300})
    began = time.monotonic()
    async with capture(3, engines=[llm], config=limited) as cap:
        await generate(llm)
        await asyncio.sleep(1)
    say("idle with stacks and a budget", cap, took_s=time.monotonic() - began)

    await llm.sleep(1)
    asleep = await llm.is_sleeping()
    async with capture(4, engines=[llm], config=config) as cap:
        pass
    say("asleep", cap, asleep=asleep)
    await llm.wake_up()

    await llm.collective_rpc("move_away", args=(save_path,))
    async with capture(5, engines=[llm], config=config) as cap:
        await generate(llm)
    say("its worker has a disk of its own", cap)

    async with capture(6, engines=[llm], config=config) as cap:
        await generate(llm)
        os.kill(core_of(llm), signal.SIGKILL)
        began = time.monotonic()
    say("its core is killed in the capture", cap, took_s=time.monotonic() - began)
    await until(lambda: ended(worker))
    say("its worker ends with it", cap)


def of(save_path: str, ranks: object, **more: object) -> ProfileConfig:
    return ProfileConfig.from_mapping(
        {"save_path": save_path, "steps": "0:1000", "roles": {"rollout": {"ranks": ranks}}, **more}
    )


async def generate(llm: Any) -> None:
    global _requests

    async def one(name: str) -> None:
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        async for _ in llm.generate("hello world", sampling, name):
            pass

    _requests += 3
    await asyncio.gather(*(one(f"request-{_requests - number}") for number in range(3)))


def core_of(llm: Any) -> int:
    (process,) = llm.engine_core.resources.engine_manager.processes
    return int(process.pid)


def ended(pid: int) -> bool:
    """Whether that process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


def say(case: str, cap: Capture, replica: int = 0, **more: object) -> int:
    """Returns the pid of a worker whose trace is there."""
    manifest, folder = cap.result.manifest(), cap.result.path
    assert manifest is not None
    assert folder is not None
    (item,) = [e for part in manifest.processes for e in part.expected if e.name == f"replica {replica}"]
    sidecars = sorted(folder.rglob("*.pt.trace.json.gz.meta.json"))
    files = [{"name": path.name, **json.loads(path.read_text())} for path in sidecars]
    found = {"case": case, "state": item.state, "reason": item.reason, "ignored": item.ignored}
    print(json.dumps({**found, "files": files, **more}), flush=True)
    return next((int(each["artifact"]["pid"]) for each in files), 0)


async def main(case: str, model: str, save_path: str, arguments: dict[str, Any]) -> None:
    extended = not case.startswith("experts")
    built = {**arguments, **stepscope_vllm.engine_args(of(save_path, "all"), extension=extended)}
    own = {"pipeline": "Pipeline", "trouble": "OtherHost"}.get(case)
    if own is not None:
        built["worker_extension_cls"] = f"more_worker.{own}"
    llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **built))
    try:
        if case == "trouble":
            await trouble(llm, save_path)
        else:
            await layout(llm, save_path, llm.vllm_config.parallel_config.world_size)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
