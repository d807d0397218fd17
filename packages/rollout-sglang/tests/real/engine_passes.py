"""Tests of a real scheduler's forward passes and their requests, against the engine's answers.

Run by `test_engines.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints.engine import MultiprocessingSerializer
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput, UpdateWeightVersionReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from tiny_sglang import on_its_loop

from stepscope import ProfileConfig, capture, trajectory, turn
from stepscope.engines.passes import between
from stepscope.files.passes import PassFile
from stepscope_report.sections.batches import step_batches
from stepscope_report.sections.requests import step_requests
from stepscope_report.timeline import load_step
from stepscope_report.timeline.passes import RequestKey, linked_requests
from stepscope_sglang import SglangProfiler, record_request

REQUESTS = 24
IS_VERSIONED = hasattr(TokenizerManager, "update_weight_version")
"""False before SGLang 0.5.23, when schedulers do not know the version of the weights."""


async def play(engine: Any, number: int, answers: dict[str, Any]) -> None:
    name = f"task-{number}"
    sampling = {"max_new_tokens": 2 + number * 7 % 30, "temperature": 0, "ignore_eos": True}
    with trajectory(name), turn(0) as this_turn:
        prompt = [1 + (number + place) % 500 for place in range(3 + number)]
        answers[name] = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
        record_request(this_turn, answers[name])


def config_of(folder: Path, **settings: object) -> ProfileConfig:
    return ProfileConfig(
        save_path=folder,
        steps="1:9",
        roles={"rollout": {"ranks": "all", "engine": {"iterations": {"count": 3}, **settings}}},
        torch={"activities": ["cpu"]},
    )


async def update_weights(manager: Any, **version: str) -> None:
    """Give the engine two tensors, each in a bucket of its own, as a trainer does."""
    has_sessions = hasattr(io_struct, "BeginWeightUpdateReqInput")
    if has_sessions:
        await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
    for name in ("ln_f.weight", "ln_f.bias"):
        bucket = [(f"transformer.{name}", torch.ones(64, dtype=torch.bfloat16))]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket)],
            flush_cache=False,  # a flush just after the last answer would kill 0.5.12
            **version,
        )
        done, message = await manager.update_weights_from_tensor(request)
        assert done, message
    if has_sessions:
        await manager.end_weight_update(io_struct.EndWeightUpdateReqInput())


def test_passes_are_noted_without_a_profile_and_none_is_left_armed(engine: Any, tmp_path: Path) -> None:
    answers: dict[str, Any] = {}

    async def step(number: int, config: ProfileConfig) -> None:
        async with capture(number, engines=engine, config=config):
            await asyncio.gather(*(play(engine, one, answers) for one in range(4)))

    for number in (1, 2):
        on_its_loop(engine, step(number, config_of(tmp_path, profiler="passes")))
        (passes,) = load_step(tmp_path / f"step_00000{number}").passes
        served = passes.noted.served
        told = [answer["meta_info"] for answer in answers.values()]
        assert sum(served.output) == sum(one["completion_tokens"] for one in told)
        assert sum(served.tokens) == sum(one["prompt_tokens"] + one["completion_tokens"] - 1 for one in told)
    assert not list(tmp_path.rglob("*trace.json*"))
    on_its_loop(engine, step(3, config_of(tmp_path)))
    assert list(tmp_path.rglob("*trace.json*"))


def test_the_latest_passes_are_kept_between_captures_and_read_while_it_generates(
    engine: Any, tmp_path: Path
) -> None:
    """A capture takes the passes of its step, and the flight recorder keeps later passes."""
    profiler, answers, while_it_ran = SglangProfiler(engine, replica=0), dict[str, Any](), list[PassFile]()

    async def generate(*numbers: int) -> list[dict[str, Any]]:
        await asyncio.gather(*(play(engine, number, answers) for number in numbers))
        return [answers[f"task-{number}"]["meta_info"] for number in numbers]

    async def step() -> list[dict[str, Any]]:
        began_ns = time.time_ns()
        assert profiler.keep_passes(8)
        told = await generate(0, 1, 2, 3)
        async with capture(1, engines=engine, config=config_of(tmp_path, profiler="passes")):
            await generate(4, 5)
        running = asyncio.create_task(generate(*range(6, 22)))
        while not running.done():
            while_it_ran.extend(await asyncio.to_thread(profiler.kept_passes, began_ns))
        return told + await running

    def kept_since(start_ns: int) -> PassFile:
        (kept,) = profiler.kept_passes(start_ns)  # may include passes of earlier tests
        return between(kept, start_ns, time.time_ns())

    began_ns = time.time_ns()
    told = on_its_loop(engine, step())
    file = kept_since(began_ns)
    assert sum(file.served.output) == sum(one["completion_tokens"] for one in told)
    assert sum(file.served.tokens) == sum(one["prompt_tokens"] + one["completion_tokens"] - 1 for one in told)
    counts = [len(read.passes.number) for read in while_it_ran]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    later = time.time_ns()
    on_its_loop(engine, generate(0))
    assert sum(kept_since(later).served.output) == answers["task-0"]["meta_info"]["completion_tokens"]


def test_weights_without_a_version_have_the_number_of_their_update(engine: Any, tmp_path: Path) -> None:
    """Each step updates the weights between two pairs of requests. The third update states a version."""
    config = config_of(tmp_path)

    async def step(number: int, version: dict[str, str]) -> tuple[object, object]:
        async with capture(number, engines=engine, config=config):
            await asyncio.gather(play(engine, 0, {}), play(engine, 1, {}))
            await update_weights(engine.tokenizer_manager, **version)
            await asyncio.gather(play(engine, 2, {}), play(engine, 3, {}))
        rows = step_requests(load_step(tmp_path / f"step_{number:06d}"))
        told = {row.trajectory: {row.version_begun, row.version_ended} for row in rows}
        assert told["task-0"] == told["task-1"]
        assert told["task-2"] == told["task-3"]
        (before,), (after,) = told["task-0"], told["task-2"]
        return before, after

    versions: list[dict[str, str]] = [{}, {}, {"weight_version": "40"}, {}]
    told = [on_its_loop(engine, step(number, version)) for number, version in enumerate(versions, 1)]
    first = int(str(told[0][0]).removeprefix("update "))
    counts: list[object] = [f"update {number}" for number in range(first, first + 5)]
    counts[3] = 40 if IS_VERSIONED else counts[3]
    assert told == list(pairwise(counts))


def test_every_request_is_joined_to_its_turn_and_has_the_tokens_of_its_answer(
    engine: Any, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    answers: dict[str, Any] = {}

    async def step() -> None:
        async with capture(7, engines=engine, config=config):
            await asyncio.gather(*(play(engine, number, answers) for number in range(REQUESTS // 2)))
            if IS_VERSIONED:
                await engine.tokenizer_manager.update_weight_version(
                    UpdateWeightVersionReqInput(new_version="7", abort_all_requests=False)
                )
            await asyncio.gather(
                *(play(engine, number, answers) for number in range(REQUESTS // 2, REQUESTS))
            )

    on_its_loop(engine, step())
    timeline = load_step(tmp_path / "step_000007")
    (passes,) = timeline.passes
    noted, links = passes.noted, linked_requests(timeline)
    assert len(links) == len(noted.requests.id) == REQUESTS
    wrote, computed = Counter[str | None](), Counter[str | None]()
    for request, tokens, output in zip(
        noted.served.request, noted.served.tokens, noted.served.output, strict=True
    ):
        name = timeline.spans[links[RequestKey(0, request)]].trajectory
        wrote[name] += output
        computed[name] += tokens
    assert wrote == {name: one["meta_info"]["completion_tokens"] for name, one in answers.items()}
    # The last token of an answer is never the input of a pass.
    assert computed == {
        name: one["meta_info"]["prompt_tokens"] + one["meta_info"]["completion_tokens"] - 1
        for name, one in answers.items()
    }
    assert max(noted.passes.requests) <= 8  # the engine runs at most 8 requests at once
    assert max(noted.passes.waiting) > 0
    assert {"prefill", "decode"} <= set(noted.passes.kind)
    begun = {request.trajectory: request.version_begun for request in step_requests(timeline)}
    counted = begun["task-0"]
    assert str(counted).startswith("update ")
    later = 7 if IS_VERSIONED else counted
    assert begun == {f"task-{n}": counted if n < REQUESTS // 2 else later for n in range(REQUESTS)}
    (batches,) = step_batches(timeline)
    assert batches.linked == REQUESTS
    assert batches.passes > 3  # notes go on after the profile has reached its count
