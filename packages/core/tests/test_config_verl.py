"""verl's own configuration files, of several releases, read as ours."""

from __future__ import annotations

import json
import os
import re
import warnings
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepscope import ProfileConfig, capture
from stepscope._recording.process import exports
from stepscope._recording.session import pipeline
from stepscope.config import EngineConfig, IterationsConfig, _verl
from stepscope.config._steps import parse_steps
from stepscope.errors import ConfigError, VerlDifference
from tests.downloads import wheel

RELEASES = ("0.7.1", "0.8.0", "0.9.1")
TORCH = "actor_rollout_ref.rollout.profiler.tool_config.torch"


@cache
def shipped(release: str) -> Any:
    """Return the configuration in the wheel of a release. Its file takes long to parse."""
    file = wheel(f"verl=={release}") / "verl/trainer/config/_generated_ppo_trainer.yaml"
    return yaml.safe_load(file.read_text())


def trainer_config(release: str, **overall: object) -> dict[str, Any]:
    config: dict[str, Any] = deepcopy(shipped(release))
    config["global_profiler"].update({"tool": "torch", "steps": [2, 5]} | overall)
    config["actor_rollout_ref"]["actor"]["profiler"].update(enable=True, ranks=[0, 8])
    return config


def tool_config(config: dict[str, Any], role: str, tool: str) -> dict[str, Any]:
    options: dict[str, Any] = config["actor_rollout_ref"][role]["profiler"]["tool_config"][tool]
    return options


def quietly(config: object) -> ProfileConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VerlDifference)
        return ProfileConfig.from_verl(config)


def differences(config: object) -> str:
    with pytest.warns(VerlDifference) as warned:
        ProfileConfig.from_verl(config)
    return "\n".join(str(warning.message) for warning in warned)


@pytest.mark.parametrize("release", RELEASES)
def test_steps_tool_roles_and_ranks_mean_what_they_mean_in_verl(release: str) -> None:
    read = quietly(trainer_config(release))
    assert read.steps == parse_steps([2, 5], "steps")
    assert read.tool == "torch"
    assert read.mode == "continuous"
    # The rollout's block refers to the actor's: enabled with it, on the same ranks.
    assert {role: settings.ranks for role, settings in read.roles.items()} == {
        "actor": (0, 8),
        "rollout": (0, 8),
    }
    assert Path(read.save_path).is_absolute()


def old(release: str, **values: Any) -> dict[str, Any]:
    """Return the configuration of an older trainer, with values at dotted paths."""
    config: dict[str, Any] = deepcopy(shipped(release))
    for path, value in values.items():
        block = config
        *parts, last = path.split(".")
        for part in parts:
            block = block[part]
        block[last] = value
    return config


@pytest.mark.parametrize(
    ("release", "values", "field"),
    [
        ("0.5.0", {"trainer.profile_steps": [1, 2]}, "trainer.profile_steps"),
        ("0.5.0", {}, "actor_rollout_ref.profiler"),
        ("0.6.1", {"reward_model.profiler.enable": True}, "reward_model.profiler"),
        ("0.7.0", {"step_start": 2}, "actor_rollout_ref.actor.profiler.tool_config.torch.step_start"),
        ("0.6.1", {"step_end": 5}, "actor_rollout_ref.actor.profiler.tool_config.torch.step_end"),
    ],
)
def test_a_key_of_an_older_release_is_an_error_that_names_the_release(
    release: str, values: dict[str, Any], field: str
) -> None:
    actor = "actor_rollout_ref.actor.profiler"
    if release != "0.5.0":
        at = f"{actor}.tool_config.torch"
        values = {name if "." in name else f"{at}.{name}": value for name, value in values.items()}
        values |= {f"{actor}.enable": True, "global_profiler.tool": "torch", "global_profiler.steps": [2]}
    with pytest.raises(ConfigError) as caught:
        quietly(old(release, **values))
    assert caught.value.field == field
    assert re.search(r" of 0\.[56]", str(caught.value.allowed))
    assert caught.value.fix


@pytest.mark.parametrize("release", RELEASES)
def test_without_steps_nothing_is_captured(release: str) -> None:
    assert quietly(trainer_config(release, steps=None)).steps == ()


def test_steps_may_be_a_text_as_in_stepscope() -> None:
    actor = {"profiler": {"enable": True, "ranks": [0]}}
    config = {
        "global_profiler": {"tool": "torch", "steps": "every:50"},
        "actor_rollout_ref": {"actor": actor},
    }
    assert quietly(config).steps == parse_steps("every:50", "steps")


def test_contents_become_the_options_of_torch() -> None:
    config = trainer_config("0.9.1")
    tool_config(config, "actor", "torch").update(contents=["cpu", "stack", "shapes"], discrete=True)
    read = quietly(config)
    assert (read.torch.activities, read.mode) == (("cpu",), "discrete")
    assert (read.torch.with_stack, read.torch.record_shapes, read.torch.profile_memory) == (True, True, False)


@pytest.mark.parametrize(("discrete", "repeat"), [(True, 0), (False, 1)])
def test_a_schedule_counts_mini_batches_and_is_one_cycle_in_continuous_mode(
    discrete: bool, repeat: int
) -> None:
    config = trainer_config("0.9.1")
    torch = tool_config(config, "actor", "torch")
    torch["discrete"] = discrete
    torch["schedule"].update(skip_first=1, warmup=1, active=2)
    schedule = quietly(config).torch.schedule
    assert schedule is not None
    assert (schedule.skip_first, schedule.warmup, schedule.active, schedule.repeat) == (1, 1, 2, repeat)


def test_a_schedule_that_records_nothing_is_none() -> None:
    assert quietly(trainer_config("0.9.1")).torch.schedule is None


def test_memory_history_becomes_the_memory_tool() -> None:
    config = trainer_config("0.9.1", tool="torch_memory")
    config["global_profiler"]["global_tool_config"]["torch_memory"].update(trace_alloc_max_entries=5000)
    read = quietly(config)
    assert (read.tool, read.cuda_memory.max_entries) == ("cuda_memory", 5000)


def test_what_is_a_trap_in_verl_is_named() -> None:
    config = trainer_config("0.9.1", profile_continuous_steps=True)
    config["critic"]["profiler"]["enable"] = True
    tool_config(config, "rollout", "torch").update(profile_token_start=4, profile_token_end=20)
    message = differences(config)
    assert "critic: ranks" in message
    assert "contents is empty" in message
    assert "discrete: false" in message
    assert "engine iterations" in message
    assert "profile_continuous_steps" in message
    iterations = quietly(config).roles["rollout"].engine.iterations
    assert (iterations.start, iterations.count) == (4, 16)


@pytest.mark.parametrize(
    ("overall", "ranks"),
    [
        ({}, (0, 8)),  # unset, verl takes the ranks that are profiled
        ({"finish_hook_ranks": [3]}, (3,)),
        ({"finish_hook_ranks": [3], "finish_hook_all_ranks": True}, "all"),
    ],
)
def test_the_command_at_the_end_is_taken_with_its_ranks(overall: dict[str, object], ranks: object) -> None:
    command = 'upload "$VERL_PROFILE_SAVE_PATH"'
    config = trainer_config("0.9.1", finish_hook_cmd=command, **overall)
    read = quietly(config).finish
    assert str(read.command).endswith("\n" + command)
    assert read.ranks == ranks
    assert "finish_hook_cmd" in differences(config)


def test_the_command_finds_the_variables_of_verl(tmp_path: Path) -> None:
    names = ("SAVE_PATH", "TOOL", "RANK", "PID", "ROLE")
    text = "printf '%s\\n' " + " ".join(f'"$VERL_PROFILE_{name}"' for name in names)
    config = quietly(trainer_config("0.9.1", finish_hook_cmd=text, save_path=str(tmp_path)))
    with capture(2, config=config, role="actor", rank=8) as block:
        pass
    assert not exports.exporter().drain(60)
    pipeline.end("the test ended", 60, patient=True)
    assert block.result.path is not None
    (log,) = block.result.path.glob("finish_*.log")
    assert log.read_text().splitlines() == [str(block.result.path), "torch", "8", str(os.getpid()), "actor"]


def test_steps_without_an_enabled_role_capture_nothing_and_say_so() -> None:
    config = trainer_config("0.9.1")
    config["actor_rollout_ref"]["actor"]["profiler"]["enable"] = False
    assert "profiler.enable" in differences(config)
    assert quietly(config).steps == ()


def test_an_omegaconf_and_a_file_are_read_as_the_mapping(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = trainer_config("0.9.1")
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(config))
    from_mapping = quietly(config)
    assert quietly(omegaconf.OmegaConf.create(config)) == from_mapping
    assert quietly(tmp_path / "trainer.yaml") == from_mapping


def test_options_and_tools_that_do_not_hold_are_named() -> None:
    config = trainer_config("0.9.1", tool="nsys")
    rollout = config["actor_rollout_ref"]["rollout"]["profiler"]
    rollout.update(enable=True, tool="torch", tool_config={"torch": {"contents": ["cuda"]}})
    config["actor_rollout_ref"]["actor"]["profiler"]["tool"] = "torch"
    message = differences(config)
    assert re.search(r"is nsys.* torch", message)
    assert "options of rollout" in message


def test_a_tool_without_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'precision_debugger'"):
        quietly(trainer_config("0.9.1", tool="precision_debugger"))


def test_roles_with_different_tools_are_refused() -> None:
    config = trainer_config("0.9.1")
    config["critic"]["profiler"].update(enable=True, tool="torch_memory")
    with pytest.raises(ConfigError, match=r"critic.*allowed: 'torch'"):
        quietly(config)


def test_what_is_no_configuration_of_verls_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_profiler"):
        ProfileConfig.from_verl({"save_path": "x"})
    with pytest.raises(ConfigError, match="OmegaConf, or a YAML"):
        ProfileConfig.from_verl(7)


# The rollout's own keys, as verl #5025 had them and forks have.


def rollout_config(**options: object) -> dict[str, Any]:
    """Return a rollout alone, with these options of torch."""
    block = {"enable": True, "tool_config": {"torch": {"discrete": True, **options}}}
    overall = {"tool": "torch", "steps": [2], "save_path": "outputs"}
    return {"global_profiler": overall, "actor_rollout_ref": {"rollout": {"profiler": block}}}


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"step_start": 3, "step_end": 8}, EngineConfig(iterations=IterationsConfig(start=3, count=5))),
        ({"step-start": 3, "step-end": 8}, EngineConfig(iterations=IterationsConfig(start=3, count=5))),
        ({"step_start": 0, "step_end": -1}, EngineConfig()),  # its defaults: all
        ({"step_start": 0, "step_end": None}, EngineConfig()),
        ({"contents": ["cuda", "merge-profiles"]}, EngineConfig(merge=True)),
        ({"contents": ["merge_profiles"]}, EngineConfig(merge=True)),
        ({"merge-profiles": True}, EngineConfig(merge=True)),
        (
            {"contents": ["profile-by-stage"], "step_end": 4},
            EngineConfig(by_stage=True, iterations=IterationsConfig(count=4)),
        ),
        (
            {"profile_by_stage": True, "step_start": 1, "step_end": 5},
            EngineConfig(by_stage=True, iterations=IterationsConfig(start=1, count=4)),
        ),
    ],
)
def test_the_engines_own_keys_are_the_engines_options(
    options: dict[str, object], engine: EngineConfig
) -> None:
    read = quietly(rollout_config(**options))
    assert read.roles["rollout"].engine == engine
    assert read.torch.schedule is None
    assert "cuda" in read.torch.activities or options.get("contents")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"contents": ["cuda", "kernels"]}, "contents"),
        ({"contents": ["profile-by-stage"]}, "step_end"),
        ({"step_start": 1.5}, "step_start"),
        ({"profile_token_start": 4, "profile_token_end": 4}, "profile_token_end"),
        ({"profile_token_start": -1}, "profile_token_start"),
    ],
)
def test_what_verl_refuses_is_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quietly(rollout_config(**options))
    assert caught.value.field == f"{TORCH}.{field}"


def test_the_contents_of_each_release_are_accepted() -> None:
    """The words that its own check lists."""
    source = (wheel("verl==0.9.1") / "verl/utils/profiler/config.py").read_text()
    torch = re.search(r"__support_contents = (\[.*?\])", source)
    npu = re.search(r'assert content in (\["npu".*?\])', source)
    assert torch is not None
    assert npu is not None
    quietly(rollout_config(contents=json.loads(torch[1])))
    assert set(json.loads(npu[1])) == set(_verl._CONTENTS["npu"])


def test_keys_that_verl_does_not_know_are_named() -> None:
    config = rollout_config(profile_tokens=3)
    config["global_profiler"]["setps"] = [3]
    config["actor_rollout_ref"]["rollout"]["profiler"]["rank"] = 0
    named = differences(config)
    for key in ("global_profiler.setps", "rollout.profiler.rank", "torch.profile_tokens"):
        assert f"{key} is no setting" in named


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("tool", ["torch", "npu", "nsys", "torch_memory"])
def test_no_key_of_a_release_is_unknown(release: str, tool: str) -> None:
    config = trainer_config(release, tool=tool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProfileConfig.from_verl(config)
    assert not [warning for warning in caught if "is no setting" in str(warning.message)]


# Supervised fine-tuning.


@pytest.mark.parametrize(("interval", "steps"), [([3, 5], ["3:6"]), ([4, 4], [4]), ([-1, -1], [])])
def test_the_interval_of_the_sft_trainer_includes_its_end(interval: list[int], steps: list[Any]) -> None:
    folder = wheel("verl==0.9.1") / "verl/trainer/config"
    config = yaml.safe_load((folder / "sft_trainer_engine.yaml").read_text())
    config["profiler"] = yaml.safe_load((folder / "profiler/profiler.yaml").read_text())  # as Hydra does
    config["profiler"].update(enable=True, ranks=[0, 1], save_path="sft")
    config["trainer"]["profile_interval"] = interval
    config["profiler"]["tool_config"]["nsys"] = {}
    read = quietly(config)
    assert read.steps == parse_steps(steps, "steps")
    assert (read.tool, read.roles["*"].ranks) == ("torch", (0, 1))
    assert read.save_path == os.path.abspath("sft")


def test_no_key_of_the_sft_trainers_profiler_is_called_unknown() -> None:
    folder = wheel("verl==0.9.1") / "verl/trainer/config"
    config = yaml.safe_load((folder / "sft_trainer_engine.yaml").read_text())
    config["profiler"] = yaml.safe_load((folder / "profiler/profiler.yaml").read_text())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProfileConfig.from_verl(config)
    assert not [warning for warning in caught if "is no setting" in str(warning.message)]


def test_an_interval_that_verl_refuses_is_refused() -> None:
    config = {"profiler": {"enable": True, "tool": "torch"}, "trainer": {"profile_interval": [5, 3]}}
    with pytest.raises(ConfigError, match=r"profile_interval is \[5, 3\]"):
        quietly(config)
