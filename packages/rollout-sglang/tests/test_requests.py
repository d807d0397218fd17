"""Tests of the facts about a request in an answer of SGLang."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stepscope_sglang import record_request, request_facts

# An answer of SGLang 0.5.23 on a CPU, with enable_metrics.
META: dict[str, Any] = {
    "id": "0870b4e7",
    "finish_reason": {"type": "length", "length": 6},
    "prompt_tokens": 8,
    "weight_version": "default",
    "num_retractions": 0,
    "forward_entry_time": 1795301143.25,
    "prefill_finished_time": 1795301143.5,
    "queue_time": 0.125,
    "completion_tokens": 6,
    "cached_tokens": 3,
    "e2e_latency": 1.5,
    "first_token_latency": 0.375,
    "request_finished_ts": 1795301144.25,
}


def test_an_answer_says_where_its_time_went() -> None:
    assert request_facts({"text": "", "meta_info": META}) == {
        "request_id": "0870b4e7",
        "weight_version": "default",
        "prompt_tokens": 8,
        "cached_tokens": 3,
        "output_tokens": 6,
        "preemptions": 0,
        "finish_reason": "length",
        "queued_s": 0.125,
        "prefill_s": 0.25,
        "decode_s": 0.75,
        "first_token_s": 0.375,
        "latency_s": 1.5,
    }


def test_meta_info_alone_will_do() -> None:
    assert request_facts(META) == request_facts({"meta_info": META})


def test_nothing_is_made_up_without_metrics() -> None:
    bare = {name: META[name] for name in ("id", "prompt_tokens", "completion_tokens", "e2e_latency")}
    assert request_facts(bare) == {
        "request_id": "0870b4e7",
        "prompt_tokens": 8,
        "output_tokens": 6,
        "latency_s": 1.5,
    }


def test_stamps_that_were_never_set_are_no_times() -> None:
    assert "prefill_s" not in request_facts({**META, "forward_entry_time": 0.0})
    assert "decode_s" not in request_facts({**META, "prefill_finished_time": None})


def test_an_answer_to_several_samples_has_no_facts_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    several: Any = [{"meta_info": META}, {"meta_info": META}]
    assert request_facts(several) == request_facts(several) == {}
    (record,) = caplog.records
    assert "give each answer" in record.getMessage()


def test_what_is_no_answer_has_no_facts() -> None:
    assert request_facts({"meta_info": None}) == {}


class Recorded:
    """A span that keeps its attributes and its child spans."""

    def __init__(self) -> None:
        self.attrs: dict[str, str | int | float] = {}
        self.below: list[tuple[str, int, int, str | None]] = []

    def set(self, **attrs: str | int | float) -> None:
        self.attrs.update(attrs)

    def add(self, stage: str, start_ns: int, end_ns: int, *, role: str | None = None) -> None:
        self.below.append((stage, start_ns, end_ns, role))


def just_now() -> dict[str, Any]:
    """Return an answer that ends now, to a request of 1.5 s: 0.125 queued, 0.25 prefill, 0.75 decode."""
    ended = time.time()
    stamps = {
        "request_received_ts": ended - 1.5,
        "forward_entry_time": ended - 1,
        "prefill_finished_time": ended - 0.75,
        "request_finished_ts": ended,
    }
    return {**META, **stamps}


def test_queue_prefill_and_decode_hang_below_the_request_as_sglang_timed_them() -> None:
    span, before = Recorded(), time.monotonic_ns()
    record_request(span, {"meta_info": just_now()})
    assert span.attrs["queued_s"] == 0.125
    assert [phase[0] for phase in span.below] == ["queue", "prefill", "decode"]
    assert {phase[3] for phase in span.below} == {"rollout"}
    times = [round((end - start) / 1e9, 3) for _, start, end, _ in span.below]
    assert times == [0.125, 0.25, 0.75]
    assert span.below[0][2] == span.below[1][1]  # one ends where the next begins
    assert abs(span.below[-1][2] - before) < 50e6  # the times are on the clock of spans


@pytest.mark.parametrize(
    "changed",
    [
        {"forward_entry_time": 3600.0, "prefill_finished_time": 3600.5},  # perf_counter, as in older versions
        {"request_finished_ts": None},
        {"queue_time": None},
        META,  # the host's clock is far off
    ],
    ids=["another clock", "no end", "no queue", "another host"],
)
def test_stamps_that_are_not_of_this_clock_give_no_spans(changed: dict[str, Any]) -> None:
    span = Recorded()
    record_request(span, {**just_now(), **changed})
    assert span.below == []
    assert span.attrs["request_id"] == "0870b4e7"
