"""A script: its own decorated tasks and actors, and imported ones, in Ray workers that are being captured.

    python ray_main.py SPAN_FOLDER EXPECTED_SPANS ADDRESS_OF_RAY

Prints as JSON what the calls returned and which spans the workers wrote:
{"returned": {call: value}, "spans": {stage: count}}.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray

from stepscope import ProfileConfig, capture, profile_step

sample_tasks = importlib.import_module("sample_tasks")
locked_tasks = importlib.import_module("locked_tasks")
remote: Any = ray.remote  # its types know neither streaming tasks nor async actors


def capture_this_worker() -> None:
    """The worker's setup hook: everything that runs in it is recorded."""
    config = ProfileConfig(
        save_path=os.environ["SPANS_IN"], steps="every:1", roles={"*": {"profiler": "off"}}
    )
    capture(1, config=config).open()


@profile_step(role="env")
def main_task(n: int) -> int:
    return n + 1


@profile_step(role="env")
def main_task_stream(n: int) -> Iterator[int]:
    for i in range(n):  # noqa: UP028 # Ray sends its statistics in, which a range does not take
        yield i


class MainActor:
    @profile_step(role="actor")
    def main_update(self, n: int, *, lr: float = 1.0) -> int:
        return n + 1

    @profile_step(role="rollout")
    def main_stream(self, n: int) -> Iterator[int]:
        for i in range(n):  # noqa: UP028 # likewise
            yield i

    @profile_step(role="actor")
    @ray.method(num_returns=2)
    def above_ray_method(self) -> tuple[int, int]:
        return 1, 2

    @ray.method(num_returns=2)
    @profile_step(role="actor")
    def below_ray_method(self) -> tuple[int, int]:
        return 1, 2


class MainAsyncActor:
    @profile_step(role="agent_loop")
    async def main_generate(self, n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    @profile_step(role="rollout")
    async def main_astream(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            await asyncio.sleep(0)
            yield i


def calls() -> dict[str, object]:
    returned: dict[str, object] = {}
    task, stream = remote(main_task), remote(main_task_stream)
    returned["main task"] = ray.get(task.remote(1))
    returned["main task stream"] = ray.get(list(stream.options(num_returns="streaming").remote(2)))
    returned["task"] = ray.get(remote(sample_tasks.task).remote(1))[:2]
    task_stream = remote(sample_tasks.task_stream)
    returned["task stream"] = ray.get(list(task_stream.options(num_returns="streaming").remote(2)))

    main_actor = remote(MainActor).remote()
    returned["main actor"] = ray.get(main_actor.main_update.remote(1, lr=2.0))
    returned["main actor stream"] = ray.get(
        list(main_actor.main_stream.options(num_returns="streaming").remote(2))
    )
    returned["above ray.method"] = ray.get(main_actor.above_ray_method.remote())
    returned["below ray.method"] = ray.get(main_actor.below_ray_method.remote())
    try:
        ray.get(main_actor.main_update.remote(1, 2, 3))
    except TypeError as error:
        returned["wrong call"] = str(error)

    threaded = remote(sample_tasks.Actor).options(max_concurrency=2).remote()
    returned["threaded actor"] = ray.get([threaded.update.remote(1), threaded.double.remote(4)])

    main_async = remote(MainAsyncActor).remote()
    returned["main async actor"] = ray.get([main_async.main_generate.remote(i) for i in range(3)])
    returned["main async actor stream"] = ray.get(
        list(main_async.main_astream.options(num_returns="streaming").remote(2))
    )
    async_actor = remote(sample_tasks.AsyncActor).remote()
    returned["async actor"] = ray.get(async_actor.generate.remote(1))
    returned["async actor stream"] = ray.get(
        list(async_actor.stream.options(num_returns="streaming").remote(2))
    )

    locked = remote(locked_tasks.LockedActor).remote()
    returned["actor beside a lock"] = ray.get(locked.locked_update.remote(1))
    locked_async = remote(locked_tasks.LockedAsyncActor).remote()
    returned["async actor beside a lock"] = ray.get(locked_async.locked_generate.remote(1))
    return returned


def spans(folder: Path, expected: int, deadline_s: float = 30) -> Counter[str]:
    """Return the stages in the workers' files, once there are `expected`."""
    until = time.monotonic() + deadline_s
    while True:
        lines = [line for file in folder.glob("step_*/spans/*") for line in file.read_text().splitlines(True)]
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        stages = Counter(line["stage"] for line in records if line["kind"] == "span")
        if stages.total() >= expected or time.monotonic() > until:
            return stages
        time.sleep(0.1)


if __name__ == "__main__":
    folder, expected = Path(sys.argv[1]), int(sys.argv[2])
    variables = {"SPANS_IN": str(folder), "PYTHONPATH": os.environ["PYTHONPATH"]}
    hooked = {"worker_process_setup_hook": capture_this_worker, "env_vars": variables}
    ray.init(sys.argv[3], log_to_driver=False, runtime_env=hooked)
    try:
        returned = calls()
        print(json.dumps({"returned": returned, "spans": spans(folder, expected)}))
    finally:
        ray.shutdown()
