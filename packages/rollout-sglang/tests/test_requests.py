"""What one answer of SGLang's says of its request."""

from __future__ import annotations

from typing import Any

from stepscope_sglang import request_facts

# As 0.5.23 answered on a CPU, with enable_metrics.
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


def test_what_is_no_answer_has_no_facts() -> None:
    assert request_facts({"meta_info": None}) == {}
