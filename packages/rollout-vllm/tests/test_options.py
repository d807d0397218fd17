"""Tests of options that an engine lacks. They are refused or reported, with a fix, and never ignored."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import stepscope_vllm
from stepscope import ProfileConfig
from stepscope.engines import Iterations, supported
from stepscope.engines.supported import supported_by
from stepscope.errors import ConfigError, EngineError
from stepscope.testing.engine_conformance import a_capture
from stepscope_vllm import _versions
from stepscope_vllm._capture import options
from stepscope_vllm._driving import ascend_profiler, discovery
from stepscope_vllm._driving.in_process import InProcessTarget
from stepscope_vllm._engine_side.extension import _set_options
from stepscope_vllm._versions import dialect_of

FOLDER, STACKS = "VLLM_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_WITH_STACK"

BUILT = {
    "profiler": "torch",
    "torch_profiler_dir": "/a/folder",
    "torch_profiler_with_stack": False,
    "torch_profiler_record_shapes": False,
    "torch_profiler_with_memory": False,
}
OLD = dialect_of(["profile_prefix"])
"""Dialect of vLLM 0.17 to 0.31."""


def unable(tmp_path: Path, **asked: Any) -> dict[str, str]:
    capture = msgspec.structs.replace(a_capture(tmp_path), **asked)
    return options.unable(capture, BUILT, OLD, "0.31.0", aimed=False)


def test_an_engine_that_was_built_without_a_profiler_says_what_to_add() -> None:
    with pytest.raises(EngineError, match=r"\{'profiler': 'torch'"):
        options.refuse_disabled({"profiler": None})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"profiler": "proton"}, "nobody has read"),
        ({"torch_profiler_dir": "s3://bucket"}, "cannot be told apart"),
    ],
)
def test_an_engine_whose_files_cannot_be_had_is_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(EngineError, match=why):
        options.refuse_disabled({**BUILT, **changes})


@pytest.mark.parametrize("option", ["with_stack", "record_shapes", "profile_memory"])
def test_an_option_that_the_engine_was_built_without_is_reported_with_the_fix(
    tmp_path: Path, option: str
) -> None:
    assert "engine_args" in unable(tmp_path, **{option: True})[option]


def test_stacks_that_nobody_asked_for_are_reported(tmp_path: Path) -> None:
    """Recording stacks is vLLM's default."""
    built = {**BUILT, "torch_profiler_with_stack": True}
    reasons = options.unable(a_capture(tmp_path), built, OLD, "0.31.0", aimed=False)
    assert "2.7 million events" in reasons["with_stack"]


def test_iterations_name_the_release_whose_start_takes_them(tmp_path: Path) -> None:
    assert "vLLM 0.32.0 has it" in unable(tmp_path, iterations=Iterations(count=2))["iterations"]


def test_an_option_of_a_later_release_is_refused_with_that_release(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"0\.31\.0 .*'profiler_kwargs'; .*0\.33\.0"):
        unable(tmp_path, extra={"profiler_kwargs": "x"})


def test_an_option_of_no_release_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"'with_magic'; .*_stack"):
        unable(tmp_path, extra={"with_magic": True})


# Options of a capture in a worker whose profiler computes its options at each start, as in vLLM 0.33.


class Wrapper:
    """A worker profiler whose start computes its options as in vLLM 0.33.0."""

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


# The tests below show that the `engine` extra of this distribution is the range that is checked at run time.


def test_an_engine_above_the_range_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    supported._warn.cache_clear()
    _versions.expect_supported("99.0.0")
    (record,) = caplog.records
    assert f"newer than {supported_by(_versions.ADAPTER)}" in record.getMessage()


def test_an_engine_below_the_range_is_refused() -> None:
    with pytest.raises(EngineError, match="pip install 'vllm>="):
        _versions.expect_supported("0.0.1")


# With STEPSCOPE_DISABLE=1, an engine is built as without stepscope.


CODE = """
from stepscope import ProfileConfig
from stepscope_vllm import engine_args, engine_env, server_args
config = ProfileConfig(save_path="run", steps=[2])
for release in ("0.12.0", "0.32.0"):
    print(engine_args(config, installed=release), engine_env(config, installed=release), server_args(config))
"""


def test_no_argument_and_no_variable_is_added() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "STEPSCOPE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{} {} []\n" * 2


# Arguments for engines of releases that are not installed.


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
    monkeypatch.setenv(STACKS, "yours")
    with pytest.raises(RuntimeError), stepscope_vllm.engine_environment(a_config(tmp_path, "torch"), 3):
        assert os.environ[FOLDER] == str(tmp_path / ".vllm" / "replica3")
        assert os.environ[STACKS] == "0"
        raise RuntimeError("building failed")
    assert FOLDER not in os.environ
    assert os.environ[STACKS] == "yours"


class LLM:
    """A stand-in for an old LLM, whose configuration has no profiler."""

    llm_engine = SimpleNamespace(vllm_config=SimpleNamespace())


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_kinds", lambda: {LLM})
    monkeypatch.delenv(FOLDER, raising=False)


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
