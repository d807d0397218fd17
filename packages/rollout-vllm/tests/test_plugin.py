"""Tests of the plugin in vLLM's processes with a stand-in for the module that it changes.
`real/test_vllm_more.py` uses the real module.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from stepscope.errors import EngineError
from stepscope_vllm import VllmProfiler
from stepscope_vllm._engine_side import plugin

pytestmark = pytest.mark.needs("torch")


@dataclass
class ProfilerConfig:
    profiler: str = "torch"
    torch_profiler_dir: str = "/a/folder"


class AsyncLLM:
    """A stand-in for an AsyncLLM with two pipeline stages and without stepscope's worker extension."""

    __module__ = "vllm.v1.engine.async_llm"
    output_handler = None
    errored = False
    engine_core = SimpleNamespace(resources=None)
    vllm_config = SimpleNamespace(
        profiler_config=ProfilerConfig(),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2),
    )

    def start_profile(self, profile_prefix: str) -> None: ...


@pytest.fixture(params=["isend_object", "isend_tensor_dict"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Return a stand-in for vLLM's `GroupCoordinator`, whose send computes a sine. The parameter is the name
    of the method that sends, which differs between GPUs and CPUs.
    """
    import torch

    cpu = request.param == "isend_tensor_dict"
    kind = type("GroupCoordinator", (), {request.param: lambda self, tensor: torch.sin(tensor)})
    parts: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"GroupCoordinator": kind},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content, send=request.param)
        monkeypatch.setitem(sys.modules, name, module)
    return kind


def send(group: type) -> None:
    import torch

    name = sys.modules["vllm"].send
    getattr(group(), name)(torch.ones(1))


def test_a_send_is_in_no_recording_and_what_follows_is(group: type) -> None:
    import torch

    plugin.load()
    plugin.load()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
        send(group)
        torch.cos(torch.ones(1))
    names = {event.name for event in session.events()}
    assert "aten::cos" in names
    assert "aten::sin" not in names


def test_a_pipeline_whose_sends_stay_open_is_refused(group: type) -> None:
    with pytest.raises(EngineError, match="load our plugin"):
        VllmProfiler(AsyncLLM()).check()
    plugin.load()
    VllmProfiler(AsyncLLM()).check()
