"""Tests of the passes of an agent loop with tools, on two replicas, two workers, or two engine cores."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from stepscope import ProfileConfig, capture, span, trajectory, turn
from stepscope.files.layout import RunLayout
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.timeline.passes import RequestKey, linked_requests
from stepscope_vllm import engine_args, record_request

TURNS = 2


class Case(NamedTuple):
    trajectories: int
    replicas: int = 1
    arguments: Mapping[str, int] = {}  # never changed
    threads: str = "nobind"


CASES = {
    "replicas": Case(128, replicas=2),
    "tensor": Case(24, arguments={"tensor_parallel_size": 2}, threads="0|1"),
    "data": Case(24, arguments={"data_parallel_size": 2}, threads="0|1"),
}


class Ran(NamedTuple):
    case: Case
    timeline: Timeline
    answers: dict[tuple[str, int], Any]
    """{(trajectory, turn): the engine's answer}."""


@pytest.fixture(autouse=True)
def own_limits() -> None:
    """Replace the time limit of other tests, because engines take minutes to start on a busy machine."""


async def play(llm: Any, number: int, replica: int | None, answers: dict[tuple[str, int], Any]) -> None:
    """Play turns of different lengths, with a tool call between turns. Replicas use the same request ids."""
    name, prompt = f"task-{number}", "hello world " * (1 + number % 9)
    with trajectory(name):
        for index in range(TURNS):
            sampling = SamplingParams(max_tokens=2 + (number * 7 + index) % 20, ignore_eos=True)
            with turn(index) as this_turn:
                async for output in llm.generate(
                    prompt, sampling, f"{number if replica is None else number // 2}-{index}"
                ):
                    answers[name, index] = output
                record_request(this_turn, answers[name, index])
                if replica is not None:
                    this_turn.set(replica=replica)
            if index + 1 < TURNS:
                with span("tool", role="env", attrs={"name": "wait"}):
                    await asyncio.sleep(0.01 * (number % 5))


@pytest.fixture(scope="module", params=CASES)
def ran(
    request: pytest.FixtureRequest,
    model: str,
    sizes: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Ran:
    case, answers = CASES[request.param], dict[tuple[str, int], Any]()
    config = ProfileConfig(
        save_path=tmp_path_factory.mktemp(request.param), steps="3", roles={"rollout": {"ranks": "all"}}
    )

    async def run() -> None:
        engines = [
            AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=model, max_num_seqs=32, **sizes, **case.arguments, **engine_args(config, replica)
                )
            )
            for replica in range(case.replicas)
        ]
        try:
            async with capture(3, engines=engines, config=config):
                await asyncio.gather(
                    *(
                        play(engines[n % case.replicas], n, n % 2 if case.replicas > 1 else None, answers)
                        for n in range(case.trajectories)
                    )
                )
        finally:
            for engine in engines:
                engine.shutdown()
            engines.clear()
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=10)  # the tasks hold the engines' sockets

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", case.threads)
        asyncio.run(run())
    gc.collect()  # the engines' sockets warn here, and not at the exit of pytest
    return Ran(case, load_step(RunLayout(Path(config.save_path)).step(3).root), answers)


def test_every_request_is_in_the_passes_of_its_own_engine_with_the_tokens_of_its_answer(ran: Ran) -> None:
    case, timeline, answers = ran
    engines = case.replicas * case.arguments.get("data_parallel_size", 1)
    assert len(timeline.passes) == engines
    links = linked_requests(timeline)
    assert len(links) == len(answers) == case.trajectories * TURNS, "each request has its turn"
    wrote, computed = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for at, engine in enumerate(timeline.passes):
        served, rows = engine.noted.served, engine.rows
        lost = set(engine.noted.preempted.request)
        assert not lost, "there is room for all"
        for place, (first, last) in enumerate(pairwise(rows)):
            for row in range(first, last):
                own = timeline.spans[links[RequestKey(at, served.request[row])]]
                key = own.trajectory or "", own.turn or 0
                wrote[key] += served.output[row]
                computed[key] += served.tokens[row]
                assert own.start_ns <= engine.begins_ns[place]
                assert engine.ends_ns[place] <= timeline.until_ns(own) + 1_000_000
                if case.replicas > 1:
                    assert int(key[0].removeprefix("task-")) % 2 == engine.replica
    assert wrote == {key: len(answer.outputs[0].token_ids) for key, answer in answers.items()}
    assert computed == {
        key: len(answer.prompt_token_ids)
        - (answer.num_cached_tokens or 0)
        + len(answer.outputs[0].token_ids)
        - 1
        for key, answer in answers.items()
    }
