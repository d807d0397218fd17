"""Tests of a real AsyncLLM's forward passes and their requests, against the engine's answers."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from stepscope import ProfileConfig, capture, trajectory, turn
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.engine_queues import EngineQueues
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import read_parts
from stepscope_report import step_report
from stepscope_report.sections.batches import step_batches
from stepscope_report.sections.long_tail import step_long_tail
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.timeline.passes import RequestKey, linked_requests
from stepscope_vllm import VllmProfiler, engine_args, record_request

TRAJECTORIES, TURNS = 32, 2


class Ran(NamedTuple):
    timeline: Timeline
    answers: dict[tuple[str, int], Any]
    """{(trajectory, turn): the engine's answer}."""


async def play(llm: Any, number: int, answers: dict[tuple[str, int], Any]) -> None:
    """Play turns of different lengths."""
    name = f"task-{number}"
    with trajectory(name):
        for index in range(TURNS):
            sampling = SamplingParams(max_tokens=2 + (number * 7 + index) % 40, ignore_eos=True)
            with turn(index) as this_turn:
                prompt = "hello world " * (1 + number % 9)
                async for output in llm.generate(prompt, sampling, f"{name}-{index}"):
                    answers[name, index] = output
                record_request(this_turn, answers[name, index])


def until_kept(engines: EngineQueues) -> None:
    """Wait until the recorder has asked the engine to keep its passes. The recorder tries every 2 s."""
    until = time.monotonic() + 60
    while not next(iter(engines.passes(0)))[1]:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def runs(model: str, sizes: dict[str, Any], run_folder: Path) -> dict[int, Ran]:
    """Return a captured step, and a step that the flight recorder writes after its end."""
    config = ProfileConfig(save_path=run_folder, steps=[3], roles={"rollout": {"ranks": "all"}})
    answers: dict[int, dict[tuple[str, int], Any]] = {2: {}, 3: {}, 4: {}}

    async def run() -> None:
        # Prompts are computed in chunks, and the KV cache is small, so that requests are preempted.
        arguments = AsyncEngineArgs(
            model=model,
            max_num_batched_tokens=64,
            enable_chunked_prefill=True,
            num_gpu_blocks_override=24,
            max_num_seqs=8,
            **sizes,
            **engine_args(config, 0),
        )
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            async with capture(2, engines=[llm], config=config):
                await play(llm, 0, answers[2])
                recorder = standing.standing()
                assert recorder is not None
                assert recorder.engines is not None
                await asyncio.to_thread(until_kept, recorder.engines)
            for step in (3, 4):
                async with capture(step, engines=[llm], config=config):
                    own = (play(llm, number, answers[step]) for number in range(TRAJECTORIES))
                    await asyncio.gather(*own)
                    assert len(await llm.collective_rpc("check_health")) == 1
            for step, running in ((5, 4), (6, 20)):
                answers[step] = {}
                window = {"rollout": {"ranks": "all", "engine": {"iterations": {"running": running}}}}
                some = ProfileConfig(save_path=run_folder, steps=[5, 6], roles=window)
                async with capture(step, engines=[llm], config=some):
                    await asyncio.gather(
                        *(play(llm, number, answers[step]) for number in range(TRAJECTORIES))
                    )
            recorder.write_last(1)
            assert await asyncio.to_thread(recorder.drain, 60)
        finally:
            llm.shutdown()
            del llm
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=10)  # the tasks hold the engine's sockets

    asyncio.run(run())
    gc.collect()  # the engine's sockets warn here, and not at the exit of pytest
    layout = RunLayout(run_folder)
    return {step: Ran(load_step(layout.step(step).root), answers[step]) for step in answers if step > 2}


@pytest.fixture(params=[3, 4], ids=["captured", "kept"])
def ran(runs: dict[int, Ran], request: pytest.FixtureRequest) -> Ran:
    return runs[request.param]


def test_every_request_is_joined_to_its_turn_and_has_the_tokens_of_its_answer(ran: Ran) -> None:
    (engine,) = ran.timeline.passes
    noted, links = engine.noted, linked_requests(ran.timeline)
    wrote = Counter[tuple[str | None, int | None]]()
    computed = Counter[tuple[str | None, int | None]]()
    for request, tokens, output in zip(
        noted.served.request, noted.served.tokens, noted.served.output, strict=True
    ):
        span = ran.timeline.spans[links[RequestKey(0, request)]]
        wrote[span.trajectory, span.turn] += output
        computed[span.trajectory, span.turn] += tokens
    assert len(links) == len(ran.answers) == TRAJECTORIES * TURNS
    assert wrote == {key: len(answer.outputs[0].token_ids) for key, answer in ran.answers.items()}
    preempted = set(noted.preempted.request)
    for key, index in links.items():
        span = ran.timeline.spans[index]
        answer = ran.answers[span.trajectory or "", span.turn or 0]
        due = len(answer.prompt_token_ids) - (answer.num_cached_tokens or 0)
        if key.request not in preempted:  # preempted requests are computed again
            assert computed[span.trajectory, span.turn] == due + len(answer.outputs[0].token_ids) - 1


def test_passes_do_not_overlap_and_lie_inside_the_turns_of_their_requests(ran: Ran) -> None:
    (engine,) = ran.timeline.passes
    links, rows = linked_requests(ran.timeline), engine.rows
    assert all(end <= begin for end, begin in zip(engine.ends_ns, engine.begins_ns[1:], strict=False))
    for at, (begin_ns, end_ns) in enumerate(zip(engine.begins_ns, engine.ends_ns, strict=True)):
        for request in engine.noted.served.request[rows[at] : rows[at + 1]]:
            span = ran.timeline.spans[links[RequestKey(0, request)]]
            assert span.start_ns <= begin_ns <= end_ns <= ran.timeline.until_ns(span) + 1_000_000


def test_prompts_are_read_in_pieces_and_requests_are_preempted_as_the_engine_says(ran: Ran) -> None:
    (engine,) = ran.timeline.passes
    noted = engine.noted
    assert max(noted.passes.requests) <= 8
    assert max(noted.passes.waiting) > 0
    assert {"prefill", "decode", "mixed"} >= set(noted.passes.kind) >= {"decode"}
    preemptions = sum(getattr(answer.metrics, "num_preemptions", 0) for answer in ran.answers.values())
    assert len(noted.preempted.request) >= preemptions
    assert all(use is not None and 0 <= use <= 1 for use in noted.passes.kv_use)


def test_the_report_has_the_batches_and_the_times_of_each_slow_turn(ran: Ran) -> None:
    (batches,) = step_batches(ran.timeline)
    assert batches.tokens == sum(len(answer.outputs[0].token_ids) for answer in ran.answers.values())
    assert batches.linked == batches.requests == len(ran.answers)
    tail = step_long_tail(ran.timeline)
    assert tail is not None
    for slow in tail.worst:
        assert [own.turn for own in slow.turns] == list(range(TURNS))
        for own in slow.turns:
            answer = ran.answers[slow.trajectory, own.turn or 0]
            assert own.tokens == len(answer.outputs[0].token_ids)
            queued_ns = 1e9 * (answer.metrics.scheduled_ts - answer.metrics.queued_ts)
            assert abs(own.engine.queued_ns - queued_ns) < max(50e6, queued_ns / 4)


def test_a_window_opens_when_so_many_requests_run_and_else_the_manifest_says_how_many_ran(
    runs: dict[int, Ran], run_folder: Path
) -> None:
    """The engine runs at most 8 requests at once. A window asks for 4 in one step and for 20 in the next."""
    (engine,) = runs[5].timeline.passes
    noted = engine.noted
    total = sum(len(answer.outputs[0].token_ids) for answer in runs[5].answers.values())
    assert 0 < sum(noted.served.output) < total
    assert max(noted.passes.running[:20]) >= 4
    assert list((run_folder / "step_000005").rglob("*.pt.trace.json.gz"))
    assert runs[6].timeline.passes == ()
    parts = read_parts(RunLayout(run_folder).step(6))[0]
    (replica,) = (item for part in parts for item in part.expected if item.kind == "engine")
    (note,) = replica.notes
    most = re.fullmatch(r"the window never opened: at most (\d) requests ran at once, 20 asked for", note)
    assert most is not None
    assert 4 <= int(most[1]) <= 8
    assert any(note in said for said in step_report(runs[6].timeline).health.notes)


def test_the_passes_of_an_llm_whose_core_is_another_process_are_read_while_it_generates(
    model: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = LLM(model=model, **sizes)
    try:
        profiler, began_ns = VllmProfiler(llm, replica=0), time.time_ns()
        assert profiler.keep_passes(1)
        with ThreadPoolExecutor() as pool:
            answers = pool.submit(
                llm.generate, ["hello world"] * 8, SamplingParams(max_tokens=200, ignore_eos=True)
            )
            read = [len(file.passes.number) for file in profiler.kept_passes(began_ns)]
            while not answers.done():
                time.sleep(0.01)
                read += [len(file.passes.number) for file in profiler.kept_passes(began_ns)]
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers.result())
        (file,) = profiler.kept_passes(began_ns)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm, profiler
        gc.collect()  # the engine's sockets warn here
    assert sum(file.served.output) == tokens == 1600
    assert len(file.passes.number) >= 200
    assert any(0 < number < 200 for number in read)
