"""Every preset against the names of the real packages, and what is said where one does not fit."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.framework_names import DATA, arguments, definition, released, settings_of
from packages.core.tests.stale_trl import write_stale_trl
from stepscope import ProfileConfig
from stepscope._recording.instrument import configured
from stepscope._recording.process import failures
from stepscope.config import InstrumentConfig
from stepscope.config._instrument import paths_in
from stepscope.config.presets import preset_names, read_preset
from stepscope.errors import ConfigError
from stepscope_report.cli import app as main

WHEELS = [
    ("trl", "0.29.0"),
    ("trl", "1.16.0"),
    ("verl", "0.7.0"),
    ("verl", "0.9.1"),
    ("openrlhf", "0.10.4"),
    ("openrlhf", "0.11.2"),
    ("areal", "1.0.4"),
    ("skyrl", "0.4.0"),
    ("rllib", "2.60.0"),
]
RECORDED = ["nemo-rl", "slime"]
"""On no index with their code: the names are recorded from their repositories."""
NOT_THEIRS = ("transformers", "accelerate")
"""Libraries below TRL; the tests on a real TRL run through them."""


def paths_of(entry: InstrumentConfig) -> set[str]:
    """Return the arguments that an entry's paths begin with."""
    groups = (entry.same, entry.workers, entry.engines, entry.values)
    paths = [*entry.where, *entry.same, *(path for group in groups for path in group.values())]
    paths += (path for text in (*entry.id, entry.engine or "") for path in paths_in(text) if path)
    paths += filter(None, (entry.number, entry.policy_version, entry.index, entry.tool, entry.replica))
    return {re.split(r"[-.+)]", path.removeprefix("len("))[0] for path in paths} - {"result"}


def test_every_preset_is_held_to_names() -> None:
    assert {preset for preset, _ in WHEELS} | set(RECORDED) == set(preset_names())


@pytest.mark.parametrize(("preset", "version"), WHEELS)
def test_every_function_of_a_preset_is_in_the_released_package(preset: str, version: str) -> None:
    source = released(preset, version)
    for entry in read_preset(preset, lambda _: version).entries:
        if str(entry.module).split(".")[0] not in NOT_THEIRS:
            function = definition(source, str(entry.module), str(entry.name))
            assert function is not None, f"{entry.module}:{entry.name}"
            assert paths_of(entry) <= arguments(function), f"{entry.module}:{entry.name}"


@pytest.mark.parametrize("preset", RECORDED)
def test_every_function_of_a_preset_is_in_the_repository_as_recorded(preset: str) -> None:
    recorded = json.loads((DATA / f"{preset}.json").read_text())
    loaded = read_preset(preset)
    assert recorded["commit"] in loaded.tested
    for entry in loaded.entries:
        assert paths_of(entry) <= set(recorded["arguments"][f"{entry.module}:{entry.name}"])


@pytest.mark.parametrize(
    ("preset", "version"), [("openrlhf", "0.11.2"), ("trl", "1.16.0"), ("verl", "0.9.1")]
)
def test_every_setting_of_a_preset_is_in_the_released_package(preset: str, version: str) -> None:
    listed = read_preset(preset).settings
    assert listed is not None
    assert {setting.name for _, setting in listed.items()} <= settings_of(preset, released(preset, version))


def test_every_setting_of_slime_is_in_its_repository_or_sglangs() -> None:
    recorded = json.loads((DATA / "slime.json").read_text())
    listed = read_preset("slime").settings
    assert listed is not None
    elsewhere = {setting.name for _, setting in listed.items()} - set(recorded["settings"])
    # slime takes all of SGLang's options; `engine_table.py` finds these in SGLang
    assert elsewhere <= {f"--sglang-{field.replace('_', '-')}" for field in SGLANG}


SGLANG = ("enable_mixed_chunk", "max_running_requests", "mem_fraction_static", "disable_radix_cache")


def test_every_function_of_a_preset_is_in_the_package_where_that_is_installed() -> None:
    for preset in preset_names():
        spec = find_spec(read_preset(preset).distribution.replace("-", "_"))
        for entry in read_preset(preset, configured._installed).entries if spec and spec.origin else ():
            source = Path(str(spec and spec.origin)).parents[1]
            assert definition(source, str(entry.module), str(entry.name)), f"{entry.module}:{entry.name}"


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
    failures.take()
    before = set(sys.modules)
    configured.apply(ProfileConfig(instrument=["trl"]))
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    yield trainer, list(caplog.messages)
    configured.apply(ProfileConfig())
    failures.take()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_preset_that_no_longer_fits_names_what_is_missing_and_the_rest_is_timed(
    stale_trl: tuple[Any, list[str]],
) -> None:
    trainer, messages = stale_trl
    (missing,) = [line for line in messages if "'GRPOTrainer._generate'" in line]
    assert "of the preset 'trl', written for trl 0.29.0 to 1.16.0 (9.9 is installed here)" in missing
    assert "did you mean 'GRPOTrainer._generate_all'?" in missing
    assert "training continues" in missing
    assert any("no 'rloo_trainer' in trl.trainer" in line for line in messages)
    assert trainer()._calculate_rewards() == "_calculate_rewards"
    assert hasattr(trainer._calculate_rewards, "__stepscope__")


@pytest.mark.parametrize(("stale_trl", "lines"), [("0", 1), ("1", 0)], indirect=["stale_trl"])
def test_rank_0_alone_says_which_name_is_gone_once(stale_trl: tuple[Any, list[str]], lines: int) -> None:
    trainer, messages = stale_trl
    for _ in range(2):
        trainer()._generate_all()
    assert sum("'GRPOTrainer._generate'" in line for line in messages) == lines
    assert "instrument('trl.trainer.grpo_trainer', 'GRPOTrainer._generate')" in str(failures.take())


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
    with pytest.raises(ConfigError, match=r"instrument\.preset is 'areal'.*pip install areal"):
        configured.apply(ProfileConfig(instrument=["areal"]))


def test_a_module_that_is_not_there_is_refused_before_the_run() -> None:
    entry = {"module": "json.decodr", "name": "JSONDecoder.decode", "role": "env"}
    with pytest.raises(ConfigError, match=r"json\.decodr.*there is no 'decodr' in json"):
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
