"""Checks of engines before a capture: some cannot be recorded, others may die."""

from __future__ import annotations

import logging

from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._capture.options import expect_first_profiler
from stepscope_sglang._driving.facts import EngineFacts

log = logging.getLogger("stepscope")
_warned: set[str] = set()
"""Logged warnings. One writer: `warn`."""


def check_facts(facts: EngineFacts) -> None:
    """Raise EngineError for an engine that cannot be recorded at all; warn of one that may die."""
    _versions.check(facts.version)
    expect_first_profiler(facts, ())
    if facts.device == "npu":
        raise EngineError(
            "on npu SGLang writes the folders of the Ascend profiler, which this adapter does not read. "
            "Fix: record those processes with the tool npu"
        )
    since = _versions.DP_ATTENTION_SINCE
    if facts.dp_attention and _versions.older(facts.version, since):
        raise EngineError(
            f"with attention data-parallel sglang {facts.version} never answers a start. "
            f"Fix: sglang {since} or later"
        )
    if _versions.may_crash_soon(facts.version):
        warn(
            f"sglang {facts.version} may crash after a few captures (0.5.14 at the fifth, 0.5.16 before the "
            "fourteenth). Fix: sglang 0.5.18 or later"
        )
    if not facts.sleep_on_idle:
        warn(
            "the idle schedulers of this SGLang engine spin, and every turn is recorded (43000 events a "
            "second). Fix: start the engine with sleep_on_idle=True (--sleep-on-idle)"
        )


def warn(text: str) -> None:
    """Log a warning, once in each process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("stepscope: %s", text)
