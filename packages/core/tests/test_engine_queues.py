"""Queues of engines in the state of a process: requests, and the time without a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from stepscope._recording.counters.sampler import Sampler, Tick
from stepscope._recording.recorder.engine_queues import engine_states
from stepscope.engines.metrics import GENERATION_TOKENS, RUNNING, UNFINISHED, WAITING
from stepscope.files.clock import Int
from stepscope.files.counters import Series
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import EngineState, Frame, OpenSpan, ProcessState, Thread
from stepscope_report.waiting import say_call
from stepscope_report.why import why

S: Int = 10**9
NAMES = (RUNNING, WAITING, UNFINISHED, GENERATION_TOKENS)


def state_of(samples: Sequence[Mapping[str, float]], now_s: int, of: str = "replica 0") -> EngineState:
    """Return the state of an engine with a sample in each second."""
    sampler = Sampler({})
    sampler.series += [Series(series=number, name=name, of=of) for number, name in enumerate(NAMES)]
    for second, sample in enumerate(samples):
        values = {NAMES.index(name): value for name, value in sample.items()}
        sampler._ticks.append(Tick(second * S + 1, values))
    (state,) = engine_states(sampler, now_s * S + 1)
    return state


def test_the_time_without_a_token_begins_with_the_last_one() -> None:
    tokens = [{RUNNING: 2.0, WAITING: 1.0, GENERATION_TOKENS: made} for made in (0.0, 5.0, 9.0, 9.0, 9.0)]
    state = state_of(tokens, 6)
    assert (state.requests, state.running, state.waiting) == (3, 2.0, 1.0)
    assert (state.still_ns, state.sampled_ns) == (4 * S, 2 * S)


def test_an_engine_that_had_nothing_to_do_did_not_stand_still_then() -> None:
    idle = {RUNNING: 0.0, GENERATION_TOKENS: 9.0}
    state = state_of([idle, idle, {RUNNING: 1.0, GENERATION_TOKENS: 9.0}], 4)
    assert state.still_ns == 2 * S


def test_an_engine_without_requests_does_not_stand_still() -> None:
    assert state_of([{RUNNING: 0.0, GENERATION_TOKENS: 9.0}], 4).still_ns is None


def test_requests_of_the_front_end_count_where_the_scheduler_stopped_before() -> None:
    sample = {RUNNING: 0.0, WAITING: 0.0, UNFINISHED: 5.0, GENERATION_TOKENS: 9.0}
    assert state_of([sample], 1).requests == 5


def test_an_engine_without_statistics_is_judged_by_its_unfinished_requests() -> None:
    state = state_of([{UNFINISHED: 3.0}, {UNFINISHED: 2.0}, {UNFINISHED: 2.0}], 5)
    assert (state.requests, state.running, state.still_ns) == (2, None, 4 * S)


def asking(engine: EngineState, *, file: str) -> ProcessState:
    process = ProcessInfo(role="trainer", rank=None, world_size=None, host="a", pid=1)
    span = OpenSpan(span=1, role="rollout", stage="generate", age_ns=99 * S, thread=7)
    thread = Thread(id=7, name="MainThread", frames=(Frame(file, 3, "get"), Frame("loop.py", 2, "rollout")))
    return ProcessState(
        process=process, run_id="r", at_ns=0, step=1, spans=(span,), threads=(thread,), tasks=(),
        engines=(engine,),
    )  # fmt: skip


@pytest.mark.parametrize("file", ["site-packages/vllm/v1/core.py", "site-packages/httpx/_client.py"])
def test_a_server_that_does_not_answer_is_named(file: str) -> None:
    answer = why(
        [asking(EngineState(name="replica 1", sampled_ns=41 * S, still_ns=None, requests=0), file=file)]
    )
    first = answer.calls[answer.culprits[0]]
    assert (first.kind, first.stage) == ("engine", "replica 1")
    assert say_call(first).endswith("no answer for 41.0 s")
    assert "replica 1" in say_call(first)
    assert len(answer.culprits) == 1


def test_a_call_that_asks_no_engine_does_not_wait_for_one() -> None:
    engine = EngineState(name="replica 0", sampled_ns=S, still_ns=2 * S, requests=4)
    answer = why([asking(engine, file="tools.py")])
    assert answer.calls[answer.culprits[0]].stage == "generate"
    assert [answer.calls[index].kind for index in answer.culprits] == ["call", "engine"]
