"""Options that stepscope adds to the parser of a program."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from stepscope import ProfileConfig
from stepscope.errors import ConfigError
from stepscope.integrations import add_arguments, config_from_args


def parsed(*words: str) -> ProfileConfig:
    parser = add_arguments(ArgumentParser())
    return config_from_args(parser.parse_args(words))


def test_without_options_the_configuration_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPSCOPE_STEPS", "7")
    assert parsed() == ProfileConfig.from_env()
    assert parsed().selects(7)


def test_steps_folder_and_presets_are_taken_from_options(tmp_path: Path) -> None:
    config = parsed(
        *("--stepscope-steps", "2,10:50:10", "--stepscope-save-path", str(tmp_path)),
        *("--stepscope-preset", "openrlhf", "--stepscope-preset", "slime"),
    )
    assert config == ProfileConfig(
        steps=[2, "10:50:10"], save_path=tmp_path, instrument=["openrlhf", "slime"]
    )


def test_options_win_over_the_file_that_they_name(tmp_path: Path) -> None:
    file = tmp_path / "stepscope.yaml"
    file.write_text("{steps: [1], mode: discrete, instrument: [{preset: slime}]}")
    config = parsed("--stepscope-config", str(file), "--stepscope-steps", "2", "--stepscope-preset", "slime")
    assert config == ProfileConfig(steps=[2], mode="discrete", instrument=["slime"])


def test_a_wrong_option_names_its_fix() -> None:
    with pytest.raises(ConfigError, match="mean 'slime'"):
        parsed("--stepscope-preset", "slimey")
