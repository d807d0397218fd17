"""The block of stepscope in configurations that the real Hydra composes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize

from stepscope import ProfileConfig
from stepscope.errors import ConfigError
from stepscope.integrations.hydra import config_from_hydra

PROGRAM = """
import hydra
import stepscope
from stepscope.integrations.hydra import config_from_hydra

@hydra.main(version_base=None)
def main(cfg):
    print(stepscope.configure(config_from_hydra(cfg)).selects(2))

main()
"""


def composed(*overrides: str) -> ProfileConfig:
    with initialize(version_base=None):
        return config_from_hydra(compose(overrides=list(overrides)))


def test_an_override_on_the_command_line_is_a_setting() -> None:
    config = composed("+stepscope.steps=[2,'10:50:10']", "+stepscope.torch.with_stack=true")
    assert config == ProfileConfig(steps=[2, "10:50:10"], torch={"with_stack": True})


def test_the_group_lists_every_setting_with_its_default() -> None:
    assert composed("+stepscope=default") == ProfileConfig()
    assert composed("+stepscope=default", "stepscope.steps=every:50") == ProfileConfig(steps="every:50")


def test_without_the_block_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_STEPS", "7")
    assert composed("+trainer.epochs=3") == ProfileConfig(steps=[7])


def test_a_block_that_is_no_mapping_names_its_fix() -> None:
    with pytest.raises(ConfigError, match=r"write \+stepscope.steps=\[2\]"):
        config_from_hydra({"stepscope": [2]})


def test_a_program_of_hydra_is_configured_from_its_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), "+stepscope.steps=[2]", f"+stepscope.save_path={tmp_path}/run"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
