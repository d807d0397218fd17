"""Options of a capture in a worker whose profiler builds its own anew at each start, as in vLLM 0.33."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from stepscope_vllm._engine_side.extension import _set_options


class Wrapper:
    """A worker profiler whose start builds its options as that of vLLM 0.33.0 does."""

    def __init__(self) -> None:
        self._base_profiler_kwargs: dict[str, Any] = {"with_stack": True, "on_trace_ready": "vLLM's"}
        self._profiler_kwargs = dict(self._base_profiler_kwargs)
        self._custom_trace_handler = False

    def set_profiler_kwargs(self, profiler_kwargs: dict[str, Any] | None) -> None:
        handler = self._profiler_kwargs["on_trace_ready"]
        self._profiler_kwargs = {**self._base_profiler_kwargs, "on_trace_ready": handler}
        self._profiler_kwargs.update(profiler_kwargs or {})


def test_a_start_keeps_the_options_of_the_capture_and_its_end_gives_back_the_users() -> None:
    wrapper = Wrapper()
    with ExitStack() as undo:
        _set_options(undo, wrapper, {"with_stack": False, "on_trace_ready": "ours"})
        wrapper.set_profiler_kwargs(None)
        assert wrapper._profiler_kwargs == {"with_stack": False, "on_trace_ready": "ours"}
    wrapper.set_profiler_kwargs(None)
    assert wrapper._profiler_kwargs == {"with_stack": True, "on_trace_ready": "vLLM's"}
