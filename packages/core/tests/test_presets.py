"""Every preset against the names of the real packages, and what is said where one does not fit."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.core.tests.released_frameworks import (
    LOST,
    NEWEST,
    VERSIONS,
    facts_at,
    preset_at,
    released,
    settings_of,
)
from packages.core.tests.stale_trl import write_stale_trl
from stepscope import ProfileConfig
from stepscope._recording.instrument import configured
from stepscope._recording.process import failures
from stepscope.config import InstrumentConfig
from stepscope.config._instrument import paths_in
from stepscope.config.presets import Preset, preset_names, read_preset
from stepscope.errors import ConfigError
from stepscope_report.cli import app as main
from tools.framework_facts import DecoratorFacts, FunctionFacts, Source, read_facts

NOT_REACHED = {
    "accelerate.utils.deepspeed:DeepSpeedOptimizerWrapper": "does nothing: the engine steps in backward",
    "accelerate.utils.megatron_lm:MegatronLMOptimizerWrapper": "does nothing: the engine steps in train_step",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": "starts trajectories, and waits for none",
    "ray.rllib.core.learner.torch.torch_meta_learner:TorchMetaLearner": "of an algorithm that was taken out",
    "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter": "it has no steps",
}
"""Classes whose own method is in no entry -> why."""


def faults(preset: Preset, functions: Mapping[str, FunctionFacts], lost: Set[tuple[str, str]]) -> list[str]:
    """Return what keeps an entry of a preset from recording what it says."""
    covered = {f"{entry.module}:{entry.name}" for entry in preset.entries}
    return [
        f"{entry.module}:{entry.name}: {fault}"
        for entry in preset.entries
        for fault in _faults(preset, entry, functions.get(f"{entry.module}:{entry.name}"), covered, lost)
    ]


def _faults(
    preset: Preset,
    entry: InstrumentConfig,
    facts: FunctionFacts | None,
    covered: Set[str],
    lost: Set[tuple[str, str]],
) -> Iterator[str]:
    if facts is None:
        yield f"it is not there (if its entry is new: python -m tools.framework_facts {preset.name})"
        return
    for argument in sorted(paths_of(entry) - set(facts.arguments)):
        if (preset.name, argument) not in lost:
            yield f"no argument {argument!r} among {', '.join(facts.arguments)}"
    if facts.looks_at_caller:
        yield "it looks at the frame of its caller, and would find a wrapper"
    if facts.is_generator and (entry.step or entry.kind != "span" or entry.where or entry.same):
        yield "a generator can only be a span"
    for decorator in facts.decorators:
        if decorator.shape == "unknown":
            yield f"nobody knows what its decorator {decorator.name} makes of it"
    method = str(entry.name).rpartition(".")[2]
    arounds = [each for each in preset.entries if each.step == "around"]
    for cls in facts.overridden_in:
        # a call around each step ends it, whatever becomes of the loop
        around = entry.step == "end" and any(f"{e.module}:{e.name}".startswith(f"{cls}.") for e in arounds)
        named = any(cls.split(":")[1] in classes for classes in preset.covers.values())
        if cls.endswith("Trainer") and preset.covers and not named:
            continue  # a run with it says that the preset does not cover it
        if f"{cls}.{method}" not in covered and cls not in NOT_REACHED and not around:
            yield f"{cls} has a {method} of its own, which has no entry"


def paths_of(entry: InstrumentConfig) -> set[str]:
    """Return the arguments that an entry's paths begin with."""
    groups = (entry.same, entry.workers, entry.engines, entry.values)
    paths = [*entry.where, *entry.same, *(path for group in groups for path in group.values())]
    paths += (path for text in (*entry.id, entry.engine or "") for path in paths_in(text) if path)
    paths += filter(
        None, (entry.number, entry.policy_version, entry.index, entry.tool, entry.replica, entry.request)
    )
    return {re.split(r"[-.+)]", path.removeprefix("len("))[0] for path in paths} - {"result"}


def test_every_preset_is_held_to_facts() -> None:
    assert {preset for preset, _ in VERSIONS} == set(preset_names())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "version"), VERSIONS)
def test_every_entry_of_a_preset_fits_its_framework(preset: str, version: str) -> None:
    lost = LOST.keys() if version == NEWEST else set()
    assert faults(preset_at(preset, version), facts_at(preset, version), lost) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "RayTrainGroup.update_weight"}, "it is not there"),
        ({"number": "rollout_id"}, "no argument 'rollout_id' among self"),
        ({"name": "RolloutManager._samples", "module": "slime.ray.rollout"}, "can only be a span"),
        ({"name": "RolloutManager._called", "module": "slime.ray.rollout"}, "looks at the frame"),
        ({"name": "RolloutManager._odd", "module": "slime.ray.rollout"}, "its decorator odd"),
        (
            {"name": "RolloutManager._old", "module": "slime.ray.rollout"},
            "slime.new:New has a _old of its own",
        ),
    ],
)
def test_a_planted_wrong_entry_is_found(change: dict[str, Any], expected: str) -> None:
    preset, functions = preset_at("slime", NEWEST), dict(facts_at("slime", NEWEST))
    planted = {
        "_samples": FunctionFacts(("self",), is_generator=True),
        "_called": FunctionFacts(("self",), looks_at_caller=True),
        "_odd": FunctionFacts(("self",), decorators=(DecoratorFacts("odd", "unknown"),)),
        "_old": FunctionFacts(("self",), overridden_in=("slime.new:New",)),
    }
    functions.update({f"slime.ray.rollout:RolloutManager.{name}": facts for name, facts in planted.items()})
    bare: dict[str, Any] = {"workers": {}, "engines": {}} if "number" not in change else {}
    first = msgspec.structs.replace(preset.entries[0], **bare, **change)
    wrong = msgspec.structs.replace(preset, entries=(first, *preset.entries[1:]))
    (fault,) = faults(wrong, functions, set())
    assert expected in fault


def test_a_source_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "workers.py").write_text(WORKERS)
    source = Source(tmp_path)
    facts = source.facts("loop", "Base.step")
    assert facts == FunctionFacts(
        arguments=("self", "batch", "rest", "kind", "more"),
        is_async=True,
        decorators=(DecoratorFacts("timed", "plain", True), DecoratorFacts("torch.no_grad", "plain")),
        actors={"loop:Own": "decorator", "workers:Called": "call", "workers:Made": "module"},
        overridden_in=("workers:Other",),
    )
    inherited = source.facts("workers", "Made.step")
    assert inherited is not None
    assert inherited.defined_in == "loop:Base"
    assert source.facts("loop", "Base.stop") is None


LOOP = """
import sys, functools, ray, torch
def timed(name):
    def decorate(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            looked()
            return fn(*args, **kwargs)
        return inner
    return decorate
def looked():
    return sys._getframe(1)
class Base:
    @timed("step")
    @torch.no_grad()
    async def step(self, batch, *rest, kind=None, **more): ...
@ray.remote(num_cpus=1)
class Own(Base): ...
"""
WORKERS = """
import ray
from loop import Base as Above
class Made(Above): ...
Remote = ray.remote(num_gpus=1)(Made)
class Called(Above): ...
class More(Above):
    async def step(self, batch, *rest, kind=None, **more):
        return await super().step(batch)
class Other(Above):
    async def step(self, batch): ...
def start():
    return ray.remote(Called)
"""


@pytest.mark.parametrize(
    ("preset", "version"), [("openrlhf", "0.11.2"), ("trl", "1.16.0"), ("verl", "0.9.1")]
)
def test_every_setting_of_a_preset_is_in_the_released_package(preset: str, version: str) -> None:
    listed = read_preset(preset).settings
    assert listed is not None
    assert {setting.name for _, setting in listed.items()} <= settings_of(preset, released(preset, version))


def test_every_setting_of_slime_is_in_its_repository_or_sglangs() -> None:
    listed = read_preset("slime").settings
    assert listed is not None
    elsewhere = {setting.name for _, setting in listed.items()} - set(read_facts("slime").settings)
    # slime takes all of SGLang's options; `engine_table.py` finds these in SGLang
    assert elsewhere <= {f"--sglang-{field.replace('_', '-')}" for field in SGLANG}


SGLANG = ("enable_mixed_chunk", "max_running_requests", "mem_fraction_static", "disable_radix_cache")


@pytest.mark.parametrize("preset", ["nemo-rl", "slime"])
def test_a_preset_of_a_framework_without_releases_names_the_commit(preset: str) -> None:
    assert read_facts(preset).commit in read_preset(preset).tested


@pytest.fixture
def stale_trl(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Any, list[str]]]:
    """Provide a trl 9.9 whose GRPOTrainer has another name for one function, and no RLOOTrainer.

    A parameter is the rank of this process.
    """
    if hasattr(request, "param"):
        monkeypatch.setenv("RANK", request.param)
    monkeypatch.syspath_prepend(write_stale_trl(tmp_path / "modules"))
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    before = set(sys.modules)
    configured.apply(ProfileConfig(instrument=["trl"]))
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    yield trainer, list(caplog.messages)
    configured.apply(ProfileConfig())
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_preset_that_no_longer_fits_names_what_is_missing_and_the_rest_is_timed(
    stale_trl: tuple[Any, list[str]],
) -> None:
    trainer, messages = stale_trl
    (missing,) = [line for line in messages if "'GRPOTrainer._generate'" in line]
    assert "0.29.0 to 1.16.0 (9.9 is" in missing
    assert "'GRPOTrainer._generate_all'?" in missing
    assert "training continues" in missing
    assert any("'rloo_trainer' in trl.trainer" in line for line in messages)
    assert trainer()._calculate_rewards() == "_calculate_rewards"
    assert hasattr(trainer._calculate_rewards, "__stepscope__")


@pytest.mark.parametrize(("stale_trl", "lines"), [("0", 1), ("1", 0)], indirect=["stale_trl"])
def test_rank_0_alone_says_which_name_is_gone_once(stale_trl: tuple[Any, list[str]], lines: int) -> None:
    trainer, messages = stale_trl
    for _ in range(2):
        trainer()._generate_all()
    assert sum("'GRPOTrainer._generate'" in line for line in messages) == lines
    assert "instrument('trl.trainer.grpo_trainer', 'GRPOTrainer._generate')" in str(failures._noted)


@pytest.mark.parametrize("worker", ["ray", "multiprocessing"])
def test_workers_without_a_rank_leave_it_to_the_main_process(worker: str) -> None:
    code = "import sys\nfrom stepscope._recording.process.identity import is_first\n"
    code += "sys.argv[0] = '/x/default_worker.py'\n" if worker == "ray" else "import multiprocessing as m\n"
    ask = "m.get_context('fork').Pool(1).apply(is_first)" if worker == "multiprocessing" else "is_first()"
    environment = {name: text for name, text in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print({ask})"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_a_preset_of_a_framework_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"instrument\.preset.*'areal'"):
        configured.apply(ProfileConfig(instrument=["areal"]))


def test_a_module_that_is_not_there_is_refused_before_the_run() -> None:
    entry = {"module": "json.decodr", "name": "JSONDecoder.decode", "role": "env"}
    with pytest.raises(ConfigError, match=r"json\.decodr.* 'decodr'"):
        configured.apply(ProfileConfig(instrument=[entry]))
    configured.apply(ProfileConfig())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "verll", "x.py"], "did you mean 'verl'?"),
        (["x.py"], "there is nothing to instrument"),
        (["--preset", "trl"], "there is no program to run"),
        (["--preset", "trl", "--steps", "-1", "x.py"], "steps"),
        (["--preset", "trl", "no-such-program"], "cannot run 'no-such-program'"),
    ],
)
def test_stepscope_run_says_what_is_wrong_before_it_starts_anything(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["run", "--save-path", str(tmp_path / "run"), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_stepscope_run_prints_the_variables_that_a_cluster_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["run", "--preset", "verl", "--steps", "2", "--print-env"]) == 0
    variables = json.loads(capsys.readouterr().out)
    config = ProfileConfig.from_env({name: text for name, text in variables.items() if name[:5] == "STEPS"})
    assert config == ProfileConfig(steps=[2], instrument=["verl"], save_path=tmp_path / "outputs" / "profile")
    assert (Path(variables["PYTHONPATH"].split(os.pathsep)[0]) / "sitecustomize.py").exists()
