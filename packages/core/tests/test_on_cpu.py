"""The command line of the trainings on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.core.tests.on_cpu.launch import parse

FRONT = ["stepscope", "run", "--save-path", "a folder"]


@pytest.mark.parametrize("words", [[], ["train.steps=4", "logger=[console]"]])
@pytest.mark.parametrize("before", [[], FRONT])
def test_the_command_in_front_begins_behind_the_first_dashes(words: list[str], before: list[str]) -> None:
    arguments = ["/some/where", *words, *(["--", *before] if before else [])]
    assert parse(arguments) == (Path("/some/where"), words, before)
