"""Runs one engine of `test_vllm_more.py` in a process of its own, and prints its results as lines of JSON."""

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
from stepscope._recording.capture.capture import Capture
from stepscope.files.layout import RunLayout
from stepscope_report.cli import run as command
from stepscope_vllm import VllmProfiler

_requests = 0


PREPARED = {"pipeline": "fill_pipeline", "grid": "fill_pipeline", "expert_parallel": "map_experts"}
"""{case: method that the workers must run before they can generate}."""
EXTENSIONS = {
    "pipeline": "Pipeline",
    "grid": "Pipeline",
    "expert_parallel": "Experts",
    "trouble": "OtherHost",
}
"""{case: its worker extension in `more_worker.py`}. The case `experts` has no extension, and the other cases
have stepscope's own extension."""


async def layout(case: str, llm: Any, save_path: str) -> None:
    """Capture all workers of one replica, then only the last rank of a third replica."""
    parallel = llm.vllm_config.parallel_config
    size = parallel.world_size * parallel.data_parallel_size
    if case in PREPARED:
        await llm.collective_rpc(PREPARED[case])
    await generate(llm)
    for step, replica, ranks in ((1, 0, "all"), (2, 2, [0, 3 * size - 1])):
        config, profiler = of(save_path, ranks), VllmProfiler(llm, replica=replica)
        async with capture(step, engines=[profiler], config=config) as cap:
            await generate(llm)
        say(f"ranks {ranks}", cap, replica)
    for step in range(3, 9) if case == "grid" else ():  # a capture may end sends that an earlier one began
        async with capture(step, engines=[llm], config=of(save_path, "all")) as cap:
            await generate(llm)
        say(f"step {step}", cap)
    core = core_of(llm)
    os.kill(core, signal.SIGKILL)
    await until(lambda: ended(core))
    began = time.monotonic()
    async with capture(9, engines=[llm], config=of(save_path, "all")) as cap:
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
    step = str(RunLayout(save_path).step(2).root)
    code = await asyncio.to_thread(command, ["ls", step])
    say("its worker is frozen in the stop", cap, took_s=time.monotonic() - began, code=code)
    os.kill(worker, signal.SIGCONT)
    await until(lambda: not waits_for_late_files(cap))
    code = await asyncio.to_thread(command, ["ls", step])
    say("its worker goes on", cap, code=code)

    async with capture(20, engines=[llm], config=config) as cap:
        await generate(llm)
        os.kill(worker, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(1, os.kill, worker, signal.SIGCONT)
    async with capture(21, engines=[llm], config=config) as after:
        await generate(llm)
    say("its worker is frozen until the next capture has begun", cap)
    say("the next capture", after)

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


BUILT = {
    "torch_profiler_use_gzip": False,
    "warmup_iterations": 2,
    "active_iterations": 3,
    "ignore_frontend": False,
}


async def options(llm: Any, save_path: str) -> None:
    """Print the options of a built engine, and the report of each capture."""
    await generate(llm)
    for step, torch in ((1, {}), (2, {"profile_memory": True, "record_shapes": True, "with_stack": True})):
        config = of(save_path, "all", torch=torch, extra=BUILT)
        async with capture(step, engines=[llm], config=config) as cap:
            await generate(llm)
        say(f"step {step}", cap)


def of(save_path: str, ranks: object, **more: object) -> ProfileConfig:
    rollout = {"ranks": ranks, "engine": {"extra": more.pop("extra", {})}}
    return ProfileConfig.from_mapping(
        {"save_path": save_path, "steps": "0:1000", "roles": {"rollout": rollout}, **more}
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
    return int(llm.engine_core.resources.engine_manager.processes[0].pid)


def ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it yet."""
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


def waits_for_late_files(cap: Capture) -> bool:
    manifest = cap.result.manifest()
    return manifest is not None and bool(manifest.awaited(only="late"))


def say(case: str, cap: Capture, replica: int = 0, **more: object) -> int:
    """Print the result of a capture, and return the pid of a worker that has a trace."""
    manifest, folder = cap.result.manifest(), cap.result.path
    assert manifest is not None
    assert folder is not None
    (item,) = [e for part in manifest.processes for e in part.expected if e.name == f"replica {replica}"]
    sidecars = sorted(folder.rglob("*.pt.trace.json*.meta.json"))
    files = [
        {"name": path.name, "path": str(path).removesuffix(".meta.json"), **json.loads(path.read_text())}
        for path in sidecars
    ]
    outcome = {"case": case, "state": item.state, "reason": item.reason, "ignored": item.ignored}
    print(json.dumps({**outcome, "files": files, **more}), flush=True)
    return next((int(file["artifact"]["pid"]) for file in files), 0)


async def main(case: str, model: str, save_path: str, arguments: dict[str, Any]) -> None:
    config = of(save_path, "all", extra=BUILT if case == "options" else {})
    built = {**arguments, **stepscope_vllm.engine_args(config, extension=case != "experts")}
    if case in EXTENSIONS:
        built["worker_extension_cls"] = f"more_worker.{EXTENSIONS[case]}"
    llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **built))
    try:
        if case == "trouble":
            await trouble(llm, save_path)
        elif case == "options":
            await options(llm, save_path)
        else:
            await layout(case, llm, save_path)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
