"""Options that an engine lacks: refused or reported, with a fix, and never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engines import Iterations
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import a_capture
from stepscope_vllm._capture import options
from stepscope_vllm._versions import dialect_of

BUILT = {
    "profiler": "torch",
    "torch_profiler_dir": "/a/folder",
    "torch_profiler_with_stack": False,
    "torch_profiler_record_shapes": False,
    "torch_profiler_with_memory": False,
}
OLD = dialect_of(["profile_prefix"])
"""0.17 to 0.31."""


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
    """vLLM's own default."""
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
