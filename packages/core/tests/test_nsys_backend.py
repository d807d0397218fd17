"""The nsys backend without nsys: errors, and words that start it. `real/test_nsys.py` has a real nsys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture, prepare
from stepscope.backends import nsys
from stepscope.backends.nsys import NsysBackend, command, launch_options, runtime_env
from stepscope.errors import BackendError, CaptureError, ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.parts import fold, read_parts


def test_the_fix_is_whole_in_what_prepare_raises_and_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    config = ProfileConfig(save_path=tmp_path / "run", steps=[1], tool="nsys")
    with pytest.raises(CaptureError, match=r"Fix: on Ray, .* python train\.py`$"):
        prepare(config=config)
    with capture(1, config=config):
        pass
    manifest = fold(read_parts(RunLayout(tmp_path / "run").step(1))[0])
    reasons = [item.reason for part in manifest.processes for item in part.expected if item.kind == "trace"]
    assert [str(reason).endswith(" python train.py`") for reason in reasons] == [True]


def test_a_process_that_nsys_did_not_start_is_told_how_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    with pytest.raises(
        BackendError, match=r"runtime_env\(config\)\); elsewhere `nsys launch --trace=cuda,nvtx"
    ):
        NsysBackend(ProfileConfig()).check()


def test_each_command_is_a_session_of_its_own() -> None:
    config = ProfileConfig(nsys={"trace": ["cuda", "osrt"], "extra": {"cuda-memory-usage": "true"}})
    first, second = command(config), command(config)
    assert first[:-1] == second[:-1]
    assert first[:-1] == [
        "nsys", "launch", "--trace=cuda,osrt", "--wait=primary", "--cuda-memory-usage=true"
    ]  # fmt: skip
    assert first[-1].startswith("--session-new=")
    assert first[-1] != second[-1]


def test_ray_starts_this_python_under_nsys_in_a_session_of_the_actor() -> None:
    started = runtime_env(ProfileConfig())
    assert started == {
        "py_executable": "nsys launch --trace=cuda,nvtx --wait=primary --session-new=stepscope$$ "
        + sys.executable
    }


def test_options_of_nsys_start_are_not_given_to_launch() -> None:
    extra = {"gpu-metrics-device": "all", "sample": "process-tree", "cuda-flush-interval": "100"}
    options = launch_options(ProfileConfig(nsys={"extra": extra}))
    assert options == {"trace": "cuda,nvtx", "wait": "primary", "cuda-flush-interval": "100"}


def test_the_graphs_and_the_workers_of_an_engine_are_recorded() -> None:
    started = runtime_env(ProfileConfig(), engine=True)
    assert "--cuda-graph-trace=node --trace-fork-before-exec=true" in started["py_executable"]
    assert started["env_vars"] == {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}


def test_an_unknown_thing_to_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nsys\.trace is \['cuad'\]; allowed: a list of 'cuda'"):
        ProfileConfig(nsys={"trace": ["cuad"]})


def test_without_nvtx_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    nsys.markers.cache_clear()
    try:
        assert "pip install 'stepscope[nsys]'" in str(nsys.markers())
    finally:
        nsys.markers.cache_clear()
