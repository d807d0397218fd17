"""Arguments for engines of releases that need not be installed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import stepscope_vllm
from stepscope import ProfileConfig
from stepscope.errors import ConfigError
from stepscope_vllm._driving import ascend_profiler, discovery
from stepscope_vllm._driving.in_process import InProcessTarget


def a_config(tmp_path: Path, tool: str) -> ProfileConfig:
    return ProfileConfig.from_mapping({"save_path": str(tmp_path), "steps": [1], "tool": tool})


def test_with_nsys_the_workers_are_to_open_cuda_ranges_and_write_nothing(tmp_path: Path) -> None:
    config = a_config(tmp_path, "nsys")
    assert stepscope_vllm.engine_args(config, installed="0.32.0") == {"profiler_config": {"profiler": "cuda"}}
    assert stepscope_vllm.engine_env(config, installed="0.12.0") == {"VLLM_TORCH_CUDA_PROFILE": "1"}


def test_stacks_without_a_number_of_iterations_are_warned_of_when_the_engine_is_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, object] = {"save_path": str(tmp_path), "steps": [1], "torch": {"with_stack": True}}
    bounded = {"rollout": {"ranks": "all", "engine": {"iterations": {"start": 1, "count": 64}}}}
    stepscope_vllm.engine_args(ProfileConfig.from_mapping({**config, "roles": bounded}), installed="0.32.0")
    assert not caplog.records
    stepscope_vllm.engine_args(ProfileConfig.from_mapping(config), installed="0.32.0")
    assert "2.7 million events" in caplog.text


def test_a_kind_of_profiler_whose_files_nobody_reads_is_refused_before_the_engine_is_built(
    tmp_path: Path,
) -> None:
    extra = {"rollout": {"ranks": "all", "engine": {"extra": {"profiler": "proton"}}}}
    config = ProfileConfig.from_mapping({"save_path": str(tmp_path), "steps": [1], "roles": extra})
    with pytest.raises(ConfigError, match=r"extra\.profiler.*proton"):
        stepscope_vllm.engine_args(config, installed="0.32.0")


def test_a_release_without_cuda_ranges_names_the_one_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.11\.1 has it"):
        stepscope_vllm.engine_env(a_config(tmp_path, "nsys"), installed="0.10.2")


def test_a_server_is_not_served_for_nsys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for a server"):
        stepscope_vllm.server_args(a_config(tmp_path, "nsys"), installed="0.32.0")


def test_the_environment_of_an_old_release_is_set_around_building_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope_vllm._versions.installed", lambda: "0.12.0")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_WITH_STACK", "yours")
    with pytest.raises(RuntimeError), stepscope_vllm.engine_environment(a_config(tmp_path, "torch"), 3):
        assert os.environ["VLLM_TORCH_PROFILER_DIR"] == str(tmp_path / ".vllm" / "replica3")
        assert os.environ["VLLM_TORCH_PROFILER_WITH_STACK"] == "0"
        raise RuntimeError("building failed")
    assert "VLLM_TORCH_PROFILER_DIR" not in os.environ
    assert os.environ["VLLM_TORCH_PROFILER_WITH_STACK"] == "yours"


class LLM:
    """As much of an old one as its settings need: its configuration says nothing of a profiler."""

    llm_engine = SimpleNamespace(vllm_config=SimpleNamespace())


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_kinds", lambda: {LLM})
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)


@pytest.mark.usefixtures("old")
def test_what_an_old_engine_was_built_with_is_known_after_its_environment_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope_vllm._versions.installed", lambda: "0.12.0")
    without, built = LLM(), []
    for replica in range(2):
        with stepscope_vllm.engine_environment(a_config(tmp_path, "npu"), replica):
            built.append(LLM())
    folders = [InProcessTarget(engine).settings.get("torch_profiler_dir") for engine in (without, *built)]
    assert folders == [None, *(str(tmp_path / ".vllm" / f"replica{replica}") for replica in range(2))]


@pytest.mark.usefixtures("old")
def test_vllm_ascend_0_13_is_told_by_the_environment_though_its_vllm_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend = ascend_profiler.Ascend("vllm-ascend 0.13.0", {"msprof_tx": "False"}, by_environment=True)
    monkeypatch.setattr("stepscope_vllm._versions.installed", lambda: "0.13.0")
    assert stepscope_vllm.engine_env(a_config(tmp_path, "npu")) == {}
    monkeypatch.setattr(ascend_profiler, "installed", lambda: ascend)
    with stepscope_vllm.engine_environment(a_config(tmp_path, "npu")):
        engine = InProcessTarget(LLM())
    assert "npu.markers" in ascend_profiler.check(engine.settings, engine.environment)
