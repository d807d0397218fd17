"""Tests of the options that the adapter reads from the code of vllm-ascend, in wheels that never run.

The wheels are the oldest, the newest, and those before and after each known change.
"""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from stepscope.engines import EngineCapture
from stepscope_vllm._driving import ascend_profiler
from stepscope_vllm._files.engine_folder import is_recording
from tests.downloads import members

pytestmark = pytest.mark.slow

STACKS, MODULES, ENVIRONMENT = "with_stack", "with_modules", "VLLM_TORCH_PROFILER_WITH_STACK"
WHEELS = {
    "0.9.0rc1": None,
    "0.11.0": (STACKS, ENVIRONMENT),
    "0.13.0": (MODULES, ENVIRONMENT),
    "0.14.0rc1": (STACKS, "torch_profiler_with_stack"),
    "0.26.0rc1": (MODULES, "torch_profiler_with_stack"),
}
"""{version: (argument of torch_npu's profiler that `with_stack` sets, source of its value)}.

Releases after 0.26 have no wheel. The source of 0.30.0rc2 was compared by hand, and is as in 0.26.
"""
_TAGS = ("manylinux1_x86_64", "manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_34_x86_64")
_ANY_LINUX = [word for tag in _TAGS for word in ("--platform", tag)] + ["--python-version", "3.11"]


@cache
def package(version: str) -> Path:
    parts = tuple(f"vllm_ascend/{part}" for part in ascend_profiler.PARTS)
    return members(f"vllm-ascend=={version}", parts, *_ANY_LINUX) / "vllm_ascend"


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    with ThreadPoolExecutor(4) as several:
        list(several.map(package, WHEELS))


CAPTURE = EngineCapture(
    step=2,
    run_id="r",
    out_dir="/x/traces",
    step_dir="/x",
    name="capture2",
    replica=0,
    record_shapes=True,
    with_stack=True,
)


def worker_of(version: str) -> ast.Module:
    """Return the parsed module of the worker, which handles a start and a stop."""
    folder = package(version) / "worker"
    paths = [folder / name for name in ("worker_v1.py", "worker.py") if (folder / name).exists()]
    return ast.parse(paths[0].read_text())


@pytest.mark.parametrize("version", WHEELS)
def test_it_records_at_level1_as_text_without_mstx_and_without_shapes(version: str) -> None:
    ascend = ascend_profiler.of_source(package(version), "vllm-ascend")
    assert (ascend.arguments["profiler_level"], ascend.arguments["export_type"]) == ("Level1", "Text")
    assert ascend.arguments["msprof_tx"] == "False"
    assert not {"mstx", "record_shapes"} & ascend.arguments.keys()
    assert list(ascend.fixed()) == ["npu.level", "npu.export", "npu.markers"]
    assert "record_shapes" in ascend.unable(CAPTURE)


@pytest.mark.parametrize("version", WHEELS)
def test_what_becomes_of_stacks_is_said_as_its_code_has_it(version: str) -> None:
    ascend = ascend_profiler.of_source(package(version), "vllm-ascend")
    reason = ascend.unable(CAPTURE).get("with_stack")
    where = WHEELS[version]
    if where is None:
        assert "none" in str(reason)
    else:
        argument, setting = where
        assert setting in ascend.arguments[argument]
        assert reason == (None if argument == STACKS else "vllm-ascend records modules in its place")


@pytest.mark.parametrize("version", WHEELS)
def test_those_up_to_0_13_look_at_the_environment_alone(version: str) -> None:
    """vLLM 0.13 has a `profiler_config`, but vllm-ascend 0.13 does not read it."""
    old = tuple(map(int, version.split(".")[:2])) <= (0, 13)
    assert ascend_profiler.of_source(package(version), "vllm-ascend").by_environment == old


@pytest.mark.parametrize("version", WHEELS)
def test_a_start_takes_a_name_in_newer_ones_and_keeps_the_first(version: str) -> None:
    """This is why a capture recognises its folders by their absence before the start, and not by their
    names.
    """
    [profile] = [
        node
        for node in ast.walk(worker_of(version))
        if isinstance(node, ast.FunctionDef) and node.name == "profile"
    ]
    taken = [argument.arg for argument in profile.args.args]
    named = version == "0.26.0rc1"  # since 0.16.0rc1
    assert taken == ["self", "is_start", *(["profile_prefix"] if named else [])]
    handler = ascend_profiler.of_source(package(version), "").arguments["on_trace_ready"]
    assert handler.startswith("torch_npu.profiler.tensorboard_trace_handler(")
    assert ("worker_name=trace_name" in handler) == named
    assert ("if self.profiler is None:" in ast.unparse(profile)) == (named or "raise" in ast.unparse(profile))


def test_a_folder_as_torch_npu_names_it_is_known_with_and_without_a_workers_name() -> None:
    """The name is `<worker or host>_<pid>_<time>_ascend_pt`."""
    assert is_recording("step_000002_run_dp0_pp0_tp1_dcp0_ep1_rank1_71_20260101000000000_ascend_pt")
    assert is_recording("some-host_4711_20260101000000000_ascend_pt")


def test_code_that_is_not_as_it_was_is_called_unknown(tmp_path: Path) -> None:
    (tmp_path / "profiler").mkdir()
    (tmp_path / "profiler" / "torch_npu_profiler.py").write_text("class TorchNPUProfilerWrapper: ...")
    ascend = ascend_profiler.of_source(tmp_path, "vllm-ascend 9")
    assert ascend.unable(CAPTURE).keys() == {"npu"}
    assert "is not known" in ascend.fixed()["npu"]
