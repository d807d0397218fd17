"""Settings that a run names for advice: what a captured step keeps of a configuration, and what never."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from stepscope import ProfileConfig, capture, configure
from stepscope._recording.instrument import configured, step_boundaries
from stepscope.config.presets import preset_names, read_preset
from stepscope.engines import name_settings, settings
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import KNOBS, SWITCHES, FrameworkSettings
from stepscope.files.manifest_parts import read_parts

SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


def recorded(save_path: Path, step: int) -> tuple[FrameworkSettings, ...]:
    parts, _ = read_parts(RunLayout(save_path).step(step))
    return tuple(framework for part in parts for framework in part.settings)


def values(framework: FrameworkSettings) -> dict[str, object]:
    return {setting.name: setting.value for setting in framework.settings}


def better(framework: FrameworkSettings) -> dict[str, object]:
    return {setting.name: setting.better for setting in framework.settings if setting.better is not None}


def test_a_captured_step_keeps_what_a_program_names(tmp_path: Path) -> None:
    name_settings("mine", {"max_requests": ("slots", 128)})
    name_settings(
        "mine",
        {
            "max_requests": ("slots", 256),
            "balance_batch": ("even", False),
            "cuda_graphs": ("eager", True, False),
        },
        version="1.2",
    )
    with capture(2, config=ProfileConfig(save_path=str(tmp_path), steps=[2])):
        pass
    (framework,) = recorded(tmp_path, 2)
    assert (framework.framework, framework.version, framework.engine) == ("mine", "1.2", False)
    assert values(framework) == {"slots": 256, "even": False, "eager": True}
    assert better(framework) == {"even": True, "eager": False}


def test_engines_come_after_frameworks() -> None:
    name_settings("an engine", {"max_requests": ("slots", 1)}, engine=True)
    name_settings("mine", {"max_requests": ("slots", 1)})
    assert [framework.framework for framework in settings.kept()] == ["mine", "an engine"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": ("slots", 1)}, "allowed: knobs: agent_workers.*Fix: omit what no knob stands for"),
        ({"max_request": ("slots", 1)}, "Fix: did you mean 'max_requests'?"),
        ({"max_requests": ("slots", SECRET)}, "allowed: a number, a boolean or None"),
        ({"balance_batch": ("even", f"{SECRET} {SECRET}", "on")}, "for a switch with words, a word"),
        ({"max_requests": ("slots", float("nan"))}, "allowed: a number"),
        ({"max_requests": ("x" * 201, 1)}, "a printable name of up to 200 characters"),
        ({"max_requests": ("a\x1b[31m", 1)}, "a printable name"),
        ({"max_requests": ("slots",)}, "allowed: \\(name, value\\)"),
    ],
)
def test_a_setting_that_cannot_be_kept_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        name_settings("mine", given)
    assert settings.kept() == ()


def test_the_frameworks_of_a_process_are_bounded() -> None:
    for number in range(100):
        name_settings(f"framework {number}", {"max_requests": ("slots", number)})
    assert len(settings.kept()) == 8


def test_every_setting_of_a_preset_has_a_knob() -> None:
    listed = {name: loaded.settings for name in preset_names() if (loaded := read_preset(name)).settings}
    assert set(listed) == {"openrlhf", "slime", "trl", "verl"}
    for preset, settings_of in listed.items():
        assert settings_of is not None
        for knob, setting in settings_of.items():
            assert knob in KNOBS, (preset, knob)
            is_plain = setting.better is True and not setting.instead_of
            assert is_plain or knob in SWITCHES, (preset, knob)
            assert isinstance(setting.better, str) == bool(setting.instead_of), (preset, knob)


STANDINS: Mapping[str, tuple[str, str]] = {
    "verl": (
        "verl.trainer.ppo.ray_trainer",
        """
class RayPPOTrainer:
    def __init__(self, config): self.config, self.global_steps = config, 1
    def _start_profiling(self, do_profile): pass
    def _stop_profiling(self): pass
""",
    ),
    "slime": (
        "slime.ray.actor_group",
        """
class RayTrainGroup:
    def __init__(self, args): self.args = args
    def update_weights(self): pass
""",
    ),
    "openrlhf": (
        "openrlhf.trainer.ppo_trainer",
        """
class BasePPOTrainer:
    def __init__(self, args): self.args = args
    def restore_best_checkpoint_state(self, checkpoint_states): pass
    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None): pass
""",
    ),
    "trl": (
        "transformers.trainer_callback",
        """
class CallbackHandler:
    def on_step_begin(self, args, state, control): pass
    def on_step_end(self, args, state, control): pass
""",
    ),
}
"""Preset -> the module that begins its steps, with its names, which `test_presets.py` looks up."""
VERL = {
    "actor_rollout_ref": {
        "actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": None},
        "rollout": {
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.6,
            "enforce_eager": True,
            "tensor_model_parallel_size": SECRET,
            "enable_prefix_caching": "${oc.env:STEPSCOPE_TEST_SECRET}",
        },
    },
    "data": {"max_response_length": 512},
    "trainer": {
        "use_v1": True,
        "v1": {"trainer_mode": "sync"},
        "balance_batch": "${missing.key}",
        "token": SECRET,
    },
}


def begin_step(preset: str, module: Any, configuration: Any) -> None:
    """Call what begins a step of the framework, and end the step."""
    if preset == "verl":
        trainer = module.RayPPOTrainer(configuration)
        trainer._start_profiling(False)
        trainer._stop_profiling()
    elif preset == "slime":
        module.RayTrainGroup(configuration).update_weights()
    elif preset == "openrlhf":
        module.BasePPOTrainer(configuration).restore_best_checkpoint_state({"global_step": 0})
    else:
        handler = module.CallbackHandler()
        handler.on_step_begin(configuration, Namespace(global_step=1), None)
        handler.on_step_end(configuration, None, None)


@pytest.fixture
def framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Any]]:
    """Provide a preset in effect, and the stand-in for the module that begins its steps."""
    preset = str(request.param)
    name, source = STANDINS[preset]
    file = tmp_path.joinpath("modules", *name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (tmp_path / "modules" / preset).mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    before = set(sys.modules)
    configure(save_path=str(tmp_path / "run"), steps=["every:1"], instrument=[preset])
    yield preset, importlib.import_module(name)
    step_boundaries.switch(step_boundaries._finish(None))
    configured.apply(ProfileConfig())
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in (name.partition(".")[0], preset):
            del sys.modules[module]


SLIME = Namespace(
    balance_data=False, rollout_num_gpus=8, sglang_max_running_requests=None, router_policy="round_robin",
    sglang_disable_radix_cache=True, wandb_key=SECRET, rollout_num_gpus_per_engine=2,
)  # fmt: skip
OPENRLHF = Namespace(
    vllm=Namespace(num_engines=4, enforce_eager=False, sync_backend="gloo"),
    train=Namespace(async_enable=False, colocate_all=False, micro_batch_size=SECRET),
    logger=Namespace(wandb=Namespace(key=SECRET)),
)
TRL = Namespace(
    per_device_train_batch_size=4, gradient_checkpointing=True, max_completion_length=256, hub_token=SECRET
)


@pytest.mark.parametrize(
    ("framework", "configuration", "present", "switched"),
    [
        (
            "verl",
            OmegaConf.create(VERL),
            {
                "actor_rollout_ref.rollout.max_num_seqs": 256,
                "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
                "actor_rollout_ref.rollout.enforce_eager": True,
                "actor_rollout_ref.actor.use_dynamic_bsz": False,
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None,
                "data.max_response_length": 512,
                "trainer.v1.trainer_mode": "sync",
            },
            {
                "actor_rollout_ref.rollout.enforce_eager": False,
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "trainer.v1.trainer_mode": "colocate_async",
            },
        ),
        (
            "slime",
            SLIME,
            {
                "--balance-data": False,
                "--rollout-num-gpus": 8,
                "--rollout-num-gpus-per-engine": 2,
                "--sglang-max-running-requests": None,
                "--router-policy": "round_robin",
                "--sglang-disable-radix-cache": True,
            },
            {
                "--balance-data": True,
                "--router-policy": "power_of_two",
                "--sglang-disable-radix-cache": False,
            },
        ),
        (
            "openrlhf",
            OPENRLHF,
            {
                "--vllm.num_engines": 4,
                "--vllm.enforce_eager": False,
                "--vllm.sync_backend": "gloo",
                "--train.async_enable": False,
                "--train.colocate_all": False,
            },
            {"--vllm.sync_backend": "nccl", "--train.async_enable": True},
        ),
        (
            "trl",
            TRL,
            {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "max_completion_length": 256},
            {},
        ),
    ],
    indirect=["framework"],
)
def test_the_listed_settings_of_a_framework_are_kept_and_no_secret(
    framework: tuple[str, Any],
    configuration: Any,
    present: dict[str, object],
    switched: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPSCOPE_TEST_SECRET", SECRET)
    preset, module = framework
    begin_step(preset, module, configuration)
    step_boundaries.switch(step_boundaries._finish(None))
    steps = list((tmp_path / "run").glob("step_*"))
    assert steps
    (kept,) = recorded(tmp_path / "run", int(steps[0].name.removeprefix("step_")))
    assert kept.framework == preset
    assert values(kept) == present
    assert better(kept) == switched
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert SECRET.encode() not in written


@pytest.mark.parametrize("framework", ["verl"], indirect=True)
def test_a_setting_that_means_nothing_in_this_run_is_not_kept(framework: tuple[str, Any]) -> None:
    configuration = OmegaConf.create({"trainer": {"use_v1": False, "v1": {"trainer_mode": "sync"}}})
    begin_step(*framework, configuration)
    assert [named.settings for named in settings.kept()] == [()]
