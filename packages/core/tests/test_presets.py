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
from stepscope.cli import app as main
from stepscope.config import InstrumentConfig
from stepscope.config._instrument import paths_in
from stepscope.config.presets import preset_names, read_preset
from stepscope.errors import ConfigError
from stepscope.recording.instrument import configured
from stepscope.recording.process import failures

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
    code = "import sys\nfrom stepscope.recording.process.identity import is_first\n"
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


PROGRAM = """
import json, loop
loop.Loop().train(3)
print(json.dumps({"hidden": __import__("hidden").seen}))
"""
LOOP = """
class Loop:
    def train(self, steps):
        for _ in range(steps):
            self.step()
    def step(self):
        self.update()
    def update(self):
        pass
"""


def test_stepscope_run_captures_the_steps_of_a_program_that_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hidden.py").write_text("seen = False")
    (tmp_path / "sitecustomize.py").write_text("import hidden; hidden.seen = True")
    (tmp_path / "stepscope.yaml").write_text(
        "steps: [1]\nroles: {nobody: {ranks: all}}\ninstrument:\n"
        "- {module: loop, name: Loop.step, step: around}\n- {module: loop, name: Loop.update, role: actor}\n"
    )
    command = ["-m", "stepscope", "run", "--config", "stepscope.yaml", "--save-path", "run", "train.py"]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"hidden": True}
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000001"]
    (spans,) = (tmp_path / "run").glob("step_000001/spans/*.jsonl")
    assert '"stage":"update"' in spans.read_text()


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


# Where no step begins.

ENTRIES = """
roles: {nobody: {ranks: all}}
instrument:
- {module: loop, name: Loop.step, step: around}
- {module: loop, name: Loop.update, role: actor}
- {module: other_loop, name: Loop.step, step: begin}
"""


def launch(
    folder: Path, program: str, *words: str, entries: str = ENTRIES
) -> subprocess.CompletedProcess[str]:
    """`stepscope run` of a program beside `loop.py`."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "train.py").write_text(program)
    (folder / "stepscope.yaml").write_text(entries)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "stepscope", "run", "--config", "stepscope.yaml", "--save-path", "run", *words]
    return subprocess.run(
        [sys.executable, *command, *([] if words else ["train.py"])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "STEPSCOPE_RAISE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_step_boundary_that_never_fires_is_said_once_at_the_end(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, loop\nsubprocess.run([sys.executable, '-c', 'import loop'], check=True)\n"
    )
    done = launch(tmp_path, program)
    (line,) = [line for line in done.stderr.splitlines() if "no step began" in line]
    assert "loop:Loop.step (step: around) was patched, and was never called" in line
    assert "other_loop:Loop.step (step: begin)" in line
    assert "Else list under `instrument` the preset" in line


def test_a_boundary_that_a_child_process_calls_is_no_silence(tmp_path: Path) -> None:
    """The steps that are selected never come, and still the loop was found."""
    program = (
        "import subprocess, sys, loop\n"
        "subprocess.run([sys.executable, '-c', 'import loop; loop.Loop().train(2)'], check=True)\n"
    )
    done = launch(tmp_path, program, entries="steps: [90]\n" + ENTRIES)
    assert "no step began" not in done.stderr
    assert main.run(["ls", str(tmp_path / "run")]) != 0


def test_a_boundary_whose_condition_never_holds_says_how_often_it_was_called(tmp_path: Path) -> None:
    entries = "instrument:\n- {module: loop, name: Loop.train, step: around, where: {steps: 7}}\n"
    done = launch(tmp_path, "import loop\nloop.Loop().train(3)\n", entries=entries)
    assert "was patched, and began no step in 1 calls" in done.stderr


def test_a_program_that_is_no_python_leaves_it_to_the_python_that_it_starts(tmp_path: Path) -> None:
    done = launch(tmp_path, "import loop\n", "sh", "-c", f"{sys.executable} train.py; true")
    assert done.stderr.count("no step began") == 1


ON_RAY = """
import os, sys, ray
ray.init(address={address!r}, log_to_driver=False)
variables = {{name: text for name, text in os.environ.items() if name[:5] == "STEPS" or name == "PYTHONPATH"}}
variables["STEPSCOPE_SAVE_PATH"] = {elsewhere!r}

@ray.remote(num_cpus=0, runtime_env={{"env_vars": variables}})
def loop(steps):
    import loop
    loop.Loop().train(steps)

ray.get(loop.remote({steps}))
"""


@pytest.mark.parametrize("elsewhere", ["run", "elsewhere"])
def test_a_loop_on_a_ray_host_leaves_its_mark_in_the_folder_that_is_there(
    tmp_path: Path, ray_cluster: None, elsewhere: str
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    program = ON_RAY.format(address=address, elsewhere=str(tmp_path / elsewhere), steps=2)
    done = launch(tmp_path, program, entries="steps: [0]\n" + ENTRIES)
    assert (tmp_path / elsewhere / "step_000000").exists()
    assert ("no step began on this host (Ray workers of other hosts" in done.stderr) == (elsewhere != "run")


def test_the_ranks_of_a_launcher_say_it_once(tmp_path: Path) -> None:
    shell = f"for rank in 0 1 2; do RANK=$rank {sys.executable} train.py; done"
    done = launch(tmp_path, "import loop\n", "sh", "-c", shell)
    assert done.stderr.count("no step began") == 1


def test_a_program_that_configures_itself_hears_of_it_too(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    program = (
        "import stepscope, sys\n"
        "entry = {'module': 'loop', 'name': 'Loop.step', 'step': 'around'}\n"
        "stepscope.configure(save_path=sys.argv[1], steps=[1], instrument=[entry])\n"
        "import loop\n"
        "for step in range(int(sys.argv[2])):\n"
        "    with stepscope.capture(step): pass\n"
    )
    (tmp_path / "own.py").write_text(program)
    for captures, expected in (("0", 1), ("1", 0)):
        done = subprocess.run(
            [sys.executable, "own.py", str(tmp_path / captures), captures],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("no step began") == expected


def test_a_patched_function_that_no_process_called_in_a_captured_step_is_named_in_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ENTRIES + "- {module: loop, name: Loop.train, role: trainer, stage: fit}\n"
    program = "import loop\nloop.Loop().step()\nloop.Loop().train(1)\n"
    launch(tmp_path, program, entries="steps: [0]\n" + entries)
    main.run(["report", str(tmp_path / "run"), "--json"])
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["health"]["uncalled"] == ["loop:Loop.train (trainer/fit)"]
    main.run(["report", str(tmp_path / "run")])
    assert "Instrumented, without a recorded call" in capsys.readouterr().out
    assert "loop:Loop.train" in (tmp_path / "run" / "step_000000" / "report.html").read_text()
