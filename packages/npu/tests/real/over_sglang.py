"""SGLang's own profiler code, from its wheels, over the unmodified torch_npu and a stand-in for CANN.

SGLang is not installed. Two parts of its module run unchanged: the block for NPUs, and the class that starts
and stops the profiler. `test_torch_npu.py` starts pytest on this file.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from torch_npu._init.patches.monkey_patches import _apply_patches

from stepscope.backends.torch.backend import TorchBackend
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.testing.backend_conformance import a_window, written
from stepscope_npu._backend import NpuBackend
from tests.downloads import members

UTILS = "sglang/srt/utils/profile_utils.py"
PATCHES = "sglang/srt/utils/torch_npu_patch_utils.py"
_CLASSES = ("_ProfilerBase", "_ProfilerConcreteBase", "_ProfilerTorch")


def sglang(version: str) -> dict[str, Any]:
    """Return the namespace of SGLang's module after its import on an NPU, with only the names needed here."""
    folder = members(f"sglang=={version}", (UTILS, PATCHES))
    names: dict[str, Any] = {
        "torch": torch,
        "_is_npu": True,
        "ABC": ABC,
        "Path": Path,
        "os": os,
        "current_platform": SimpleNamespace(is_out_of_tree=lambda: False),
    }
    if (folder / PATCHES).exists():
        exec(compile((folder / PATCHES).read_text(), PATCHES, "exec"), names)
    module = ast.parse((folder / UTILS).read_text())
    [on_npu] = [
        node for node in module.body if isinstance(node, ast.If) and ast.unparse(node.test) == "_is_npu"
    ]
    kinds = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    exec(compile(ast.Module([on_npu, *kinds], []), UTILS, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make SGLang count as imported, and restore the names that it replaces after the test."""
    kinds = torch.profiler.ProfilerActivity
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setattr(torch.profiler, "profile", torch.profiler.profile)
    for name in ("CPU", "CUDA"):
        monkeypatch.setattr(kinds, name, getattr(kinds, name))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `_apply_patches` where torch_npu up to 2.10.0 has it and SGLang looks for it."""
    monkeypatch.setattr(torch_npu, "_apply_patches", _apply_patches, raising=False)


def npu(tmp_path: Path) -> NpuBackend:
    return NpuBackend(ProfileConfig.from_mapping({"tool": "npu", "save_path": str(tmp_path / "run")}))


def profiler(names: dict[str, Any], folder: Path) -> Any:
    """Return SGLang's profiler, made as SGLang's scheduler makes it."""
    given = {
        "output_dir": str(folder),
        "output_prefix": "",
        "output_suffix": "",
        "profile_id": "1",
        "cpu_group": None,
        "first_rank_in_node": True,
    }
    asked = inspect.signature(names["_ProfilerConcreteBase"]).parameters
    ranks = {name: 0 for name in asked if name not in given}  # arguments of older releases
    return names["_ProfilerTorch"](
        with_stack=False, record_shapes=False, activities=["CPU", "GPU"], **given, **ranks
    )


def operators_of_ours(tmp_path: Path) -> tuple[bytes, str]:
    """Record a window with stepscope, and return (its operators, its option `sglang_profiler`)."""
    backend = npu(tmp_path)
    backend.start(a_window())
    torch.ones(2).cumsum(0)
    [artifact] = backend.stop()
    [folder] = written([artifact], tmp_path / "out")
    return (folder / "FRAMEWORK" / "torch.op_range").read_bytes(), str(artifact.options["sglang_profiler"])


def test_an_older_sglang_does_not_import_beside_this_torch_npu() -> None:
    with pytest.raises(AttributeError, match="_apply_patches"):
        sglang("0.5.12")


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_newest_sglang_replaces_nothing_here_and_fails_at_its_stop(tmp_path: Path) -> None:
    own = torch.profiler.profile
    names = sglang("0.5.23")
    assert torch.profiler.profile is own
    theirs = profiler(names, tmp_path / "theirs")
    theirs.start()
    with pytest.raises(AttributeError, match="prof_if"):
        theirs.stop()


def test_this_backend_records_where_that_one_fails_and_explains_it(tmp_path: Path) -> None:
    sglang("0.5.23")
    operators, message = operators_of_ours(tmp_path)
    assert b"aten::cumsum" in operators
    assert "_apply_patches" in message
    assert "AttributeError: prof_if" in message
    assert "tool: npu" in message


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_where_sglang_replaces_torchs_profiler_both_record_one_after_the_other(
    tmp_path: Path, version: str
) -> None:
    theirs = profiler(sglang(version), tmp_path / "theirs")
    assert torch.profiler.profile is torch_npu.profiler.profile
    theirs.start()
    with pytest.raises(ProfilerBusyError, match="not stepscope's"):
        npu(tmp_path).start(a_window())
    torch.ones(2).cumprod(0)
    theirs.stop()
    operators, message = operators_of_ours(tmp_path)
    assert b"aten::cumsum" in operators
    assert "SGLang replaces it" in message
    [folder] = (tmp_path / "theirs").glob("*_ascend_pt")
    assert b"aten::cumprod" in (folder / "FRAMEWORK" / "torch.op_range").read_bytes()


@pytest.mark.usefixtures("as_before")
def test_torchs_own_backend_is_refused_where_sglang_has_replaced_what_it_needs(tmp_path: Path) -> None:
    sglang("0.5.23")
    with pytest.raises(BackendError, match=r"ProfilerActivity\.CPU.*: npu"):
        TorchBackend(ProfileConfig.from_mapping({"tool": "torch", "save_path": str(tmp_path)})).check()
