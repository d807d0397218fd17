"""What SGLang says of one request, as attributes for the span of the turn that made it."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "output_tokens",
    "num_retractions": "preemptions",
}
"""SGLang's names -> ours, the same as those of other engines."""


def request_facts(answer: Mapping[str, object]) -> dict[str, str | int | float]:
    """Where one request spent its time, for the span around it: `turn.set(**request_facts(answer))`.

    Args:
        answer: What `generate`, `async_generate` or POST /generate returned for one prompt, or its
            `meta_info`.

    Returns:
        `request_id`, `prompt_tokens`, `cached_tokens`, `output_tokens`, `finish_reason`, `weight_version`,
        `preemptions`, `latency_s`; from an engine with `enable_metrics` also `queued_s`, `prefill_s`,
        `decode_s` and `first_token_s`. What the answer does not say is not there.
    """
    inner = answer.get("meta_info", answer)
    said = inner if isinstance(inner, Mapping) else {}
    found: dict[str, str | int | float] = {}
    for name, ours in (("id", "request_id"), ("weight_version", "weight_version")):
        if isinstance(said.get(name), str):
            found[ours] = str(said[name])
    for name, ours in _COUNTS.items():
        value = said.get(name)
        if isinstance(value, int):
            found[ours] = value
    reason = said.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("type"):
        found["finish_reason"] = str(reason["type"])
    return {**found, **_times(said)}


def _times(said: Mapping[str, object]) -> dict[str, float]:
    """In s. Prefill is from the first forward pass with the request in it to its first token."""
    stamps = [
        _number(said, name) for name in ("forward_entry_time", "prefill_finished_time", "request_finished_ts")
    ]
    times = {
        "queued_s": _number(said, "queue_time"),
        "prefill_s": _between(stamps[0], stamps[1]),
        "decode_s": _between(stamps[1], stamps[2]),
        "first_token_s": _number(said, "first_token_latency"),
        "latency_s": _number(said, "e2e_latency"),
    }
    return {name: round(value, 6) for name, value in times.items() if value is not None}


def _between(began: float | None, ended: float | None) -> float | None:
    return ended - began if began and ended and ended >= began else None


def _number(said: Mapping[str, object], name: str) -> float | None:
    value = said.get(name)
    return float(value) if isinstance(value, (int, float)) else None
