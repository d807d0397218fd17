"""What is said of vllm-ascend before it is profiled. It was not run: no NPU here."""

from __future__ import annotations

import pytest

from stepscope.engines import EngineCapture
from stepscope_vllm import _options
from stepscope_vllm._versions import dialect_of


@pytest.mark.parametrize("on_ascend", [False, True])
def test_what_vllm_ascend_hard_codes_is_reported_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, on_ascend: bool
) -> None:
    monkeypatch.setattr(_options, "on_ascend", lambda: on_ascend)
    capture = EngineCapture(
        step=2,
        run_id="r",
        out_dir="/x",
        step_dir="/",
        name="p",
        replica=0,
        record_shapes=True,
        with_stack=True,
    )
    unable = _options.unable(capture, {"profiler": "torch"}, dialect_of(()), "0.32.0", aimed=True)
    assert ("record_shapes" in unable, "with_stack" in unable) == (on_ascend, on_ascend)
