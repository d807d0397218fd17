"""Tests of the note about SGLang's replacement of torch's profiler."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from stepscope_npu._backend import sglang_profiler


def modules(monkeypatch: pytest.MonkeyPatch, profile_of: str, **torch_npu: object) -> None:
    profile = type("profile", (), {"__module__": profile_of})
    torch = ModuleType("torch")
    torch.profiler = SimpleNamespace(profile=profile)  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "torch", torch)
    made = ModuleType("torch_npu")
    vars(made).update(torch_npu)
    monkeypatch.setitem(sys.modules, "torch_npu", made)


def test_torchs_own_profiler_is_nothing_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, "torch.profiler.profiler")
    assert sglang_profiler() is None


def test_a_replaced_torch_profiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, "torch_npu.profiler.profiler", _apply_patches=object())
    assert "SGLang replaces it" in str(sglang_profiler())


@pytest.mark.parametrize("imported", [False, True])
def test_what_a_newer_torch_npu_breaks_of_sglang_is_explained_where_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    modules(monkeypatch, "torch.profiler.profiler")
    if imported:
        monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    assert ("AttributeError: prof_if" in str(sglang_profiler())) == imported
