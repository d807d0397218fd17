"""Configurations of verl, given to stepscope as its own."""

from __future__ import annotations

import pytest
import yaml

from stepscope.config import resolve
from stepscope.errors import ConfigError
from tests.downloads import wheel


@pytest.mark.parametrize("name", ["_generated_ppo_trainer.yaml", "sft_trainer_engine.yaml"])
def test_a_configuration_of_verl_is_sent_to_from_verl(name: str) -> None:
    file = wheel("verl==0.9.1") / "verl/trainer/config" / name
    if "sft" in name:  # as Hydra composes it
        data = {**yaml.safe_load(file.read_text()), "profiler": {}}
        with pytest.raises(ConfigError, match=r"verl'.*\.from_verl"):
            resolve(data)
    else:
        with pytest.raises(ConfigError, match=r"verl'.*\.from_verl"):
            resolve(file)
