"""The prefix of a capture's files in vLLM, which takes 128 characters of few kinds."""

from __future__ import annotations

import re

import pytest

from stepscope_vllm._files.names import prefix_of, step_of

TAKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""By vLLM 0.32, which answers ValueError to anything else."""
LONG = f"step_000002_{'run-of-a-scheduler-with-much-to-say.' * 5}"


def test_a_name_that_vllm_takes_stays_as_it_is() -> None:
    assert prefix_of("step_000002_0e6789d8_replica1") == "step_000002_0e6789d8_replica1"


@pytest.mark.parametrize("name", ["", "_x", "step_000002_a/b c", "Schritt ä", LONG])
def test_whatever_a_run_is_called_vllm_takes_the_prefix(name: str) -> None:
    assert TAKEN.fullmatch(prefix_of(name))
    assert len(prefix_of(name)) <= 100


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{LONG}_replica0", f"{LONG}_replica1"),
        (f"{LONG}1", f"{LONG}2"),
        ("step_000002_a/b", "step_000002_a-b"),
    ],
)
def test_two_captures_that_differ_anywhere_share_no_prefix(one: str, other: str) -> None:
    """The `_` is vLLM's, which puts its own words behind it."""
    assert not f"{prefix_of(one)}_".startswith(f"{prefix_of(other)}_")
    assert not f"{prefix_of(other)}_".startswith(f"{prefix_of(one)}_")


def test_the_step_stands_in_a_prefix_that_was_cut() -> None:
    assert step_of(prefix_of(LONG)) == 2
