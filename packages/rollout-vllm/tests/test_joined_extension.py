"""Tests of classes that join a worker extension of another package with stepscope's."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest

from stepscope_vllm import WorkerExtension
from stepscope_vllm._arming.joined_extension import name_of


class Theirs:
    def greet(self) -> str:
        return "theirs"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an extension in a module that can be imported."""
    module = ModuleType("their_workers")
    monkeypatch.setitem(sys.modules, "their_workers", module)
    setattr(module, "Theirs", Theirs)  # noqa: B010  # no attribute of a module for mypy
    return "their_workers.Theirs"


def class_at(name: str) -> type:
    """Return the class with a dotted name, found as vLLM finds it."""
    module, _, kind = name.rpartition(".")
    joined: type = getattr(import_module(module), kind)
    return joined


def test_a_joined_extension_is_both(theirs: str) -> None:
    both = class_at(name_of(theirs))
    assert issubclass(both, Theirs)
    assert issubclass(both, WorkerExtension)


def test_it_is_one_class_however_often_it_is_asked_for(theirs: str) -> None:
    assert class_at(name_of(theirs)) is class_at(name_of(theirs))


def test_our_own_extension_is_left_as_it_is() -> None:
    assert name_of("stepscope_vllm.WorkerExtension") == "stepscope_vllm.WorkerExtension"
