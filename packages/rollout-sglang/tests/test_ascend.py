"""SGLang on an NPU is refused before the run, with what to do instead. It was not run: no NPU here."""

from __future__ import annotations

import pytest

from stepscope.errors import EngineError
from stepscope_sglang._capture.opening import check_facts
from stepscope_sglang._driving.facts import EngineFacts


def test_an_engine_on_an_npu_is_refused_with_the_tool_that_records_it() -> None:
    facts = EngineFacts(
        version="0.5.23",
        options=frozenset(),
        device="npu",
        tp=1,
        dp=1,
        pp=1,
        dp_attention=False,
        sleep_on_idle=True,
        speculative=False,
        disaggregation=None,
        metrics=False,
    )
    with pytest.raises(EngineError, match="the tool npu"):
        check_facts(facts)
