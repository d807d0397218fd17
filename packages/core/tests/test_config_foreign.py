"""Configurations of other projects, given to stepscope as its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stepscope.config import resolve
from stepscope.errors import ConfigError
from stepscope_report.cli import run
from tests.downloads import wheel

TITAN = """
[job]
dump_folder = "./outputs"

[profiling]  # torch.profiler
enable_profiling = true
profile_freq = 100
"""
TRL = "{model_name_or_path: Qwen/Qwen3-0.6B, output_dir: out, per_device_train_batch_size: 4}"
ACCELERATE = "{activities: [cpu], schedule_option: {wait: 1}, output_trace_dir: out}"


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


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("train.toml", TITAN, r"of torchtitan'.*Trainer.train_step, step: around"),
        ("train.yaml", "profiling: {enable_profiling: true}", r"of torchtitan'.*`steps: every:50`"),
        ("grpo.yaml", TRL, r"of transformers or TRL'.*--preset trl.*StepscopeCallback"),
        ("profile.yaml", ACCELERATE, r"of accelerate'.*under `torch`"),
    ],
    ids=["torchtitan", "torchtitan-yaml", "trl", "accelerate"],
)
def test_a_configuration_of_another_project_is_told_its_way_in(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        resolve(file)


def test_validate_names_the_way_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.toml"
    file.write_text(TITAN)
    assert run(["validate", str(file)]) != 0
    assert "configuration of torchtitan" in capsys.readouterr().err


def test_a_slip_beside_one_key_of_another_project_is_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "stepscope.yaml"
    file.write_text("{output_dir: out, steps: [2]}")
    with pytest.raises(ConfigError, match="no 'output_dir'"):
        resolve(file)
