"""Test of the version table in the package's README against the installed vLLM."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm import LLM
from vllm.config import ProfilerConfig
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.engine.async_llm import AsyncLLM

from stepscope_vllm._engine_side import plugin

PAGE = Path(__file__).parents[2] / "README.md"


def cells() -> list[str]:
    """Return the cells that the installed vLLM's row should have. test_wheels.py checks the other rows."""
    takes = [name for name in inspect.signature(AsyncLLM.start_profile).parameters if name != "self"]
    guarded = "ProfilerAlreadyActiveError" in inspect.getsource(AsyncLLM.start_profile)
    return [
        f"`{ProfilerConfig.__name__}`",
        ", ".join(f"`{name}`" for name in takes),
        "every start" if guarded else "the first start",
        "an error" if guarded else "ignored",
    ]


def test_the_row_of_this_version_is_what_it_says_itself() -> None:
    version = f"**{vllm.__version__.partition('+')[0]}**"
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and version in line]
    assert [cell for cell in cells() if f" {cell} |" not in row] == []


@pytest.mark.parametrize("kind", [AsyncLLM, LLM])
def test_both_kinds_of_engine_take_the_same(kind: type) -> None:
    start = inspect.signature(AsyncLLM.start_profile).parameters
    assert list(inspect.signature(getattr(kind, "start_profile")).parameters) == list(start)  # noqa: B009  # of a type


def test_our_plugin_is_among_those_that_vllm_loads() -> None:
    (point,) = entry_points(group=DEFAULT_PLUGINS_GROUP, name="stepscope")
    assert point.load() is plugin.load
    plugin.load()
    assert not plugin.is_missing()
