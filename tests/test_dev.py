"""`dev.py` on machines that lack something, after what went wrong before, and when it releases."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import dev
from tests.tree import PACKAGES, ROOT
from tools import engine_tests, environments, processes, repository
from tools.bump import bump, one_version
from tools.engine_environments import EngineEnvironment, engines, left_to_request, newest, unasked
from tools.environments import Environment

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of what decides about versions and environments, and `dev` working on it."""
    for file in ("pyproject.toml", "CHANGELOG.md", *(f"packages/{p.name}/pyproject.toml" for p in PACKAGES)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    manifests = [tmp_path / file.relative_to(ROOT) for file in repository.MANIFESTS]
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr(repository, "MANIFESTS", manifests)
    return tmp_path


@pytest.fixture
def environment(checkout: Path) -> Environment:
    """Return a finished environment in that checkout, with this Python in place of its own."""
    environment = Environment(checkout / ".venv", ("dev",))
    (environment.folder / "bin").mkdir(parents=True)
    # Not a link: beside this pyvenv.cfg that is a Python without this one's packages, such as pip.
    Path(environment.python).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    Path(environment.python).chmod(0o755)
    (environment.folder / "pyvenv.cfg").write_text("version = 3.11.7\n")
    environment.stamp.write_text(environment.fingerprint())
    return environment


# What is missing --------------------------------------------------------------------------------------------


def test_an_old_python_can_parse_it_and_so_print_what_is_wrong() -> None:
    ast.parse((ROOT / "dev.py").read_text(), feature_version=(3, 6))


def test_a_failing_installation_shows_what_it_printed_and_what_that_means(
    environment: Environment,
) -> None:
    program = "print('ERROR: [Errno 28] No space left on device'); raise SystemExit(2)"
    with pytest.raises(SystemExit, match=r"with 2(.|\n)*disk is"):
        environment.narrate("packages", [sys.executable, "-c", program])


def test_an_unknown_command_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert dev.main(["tets"]) == 2
    output = capsys.readouterr().out
    assert "no command 'tets'" in output
    assert "dev.py test " in output


# What happened before ---------------------------------------------------------------------------------------


def test_a_finished_environment_is_used_as_it_is(environment: Environment) -> None:
    assert environment.ready() == environment.python


def test_a_new_requirement_is_noticed_and_a_new_tool_setting_is_not(environment: Environment) -> None:
    settings = repository.ROOT / "pyproject.toml"
    settings.write_text(settings.read_text() + "\n[tool.mine]\nx = 1\n")
    assert environment.is_current()
    settings.write_text(settings.read_text().replace('"hypothesis', '"attrs", "hypothesis'))
    assert not environment.is_current()


def test_packages_that_something_else_removed_are_noticed(environment: Environment) -> None:
    packages = environment.folder / "lib" / "python3.11" / "site-packages"
    (packages / "torch").mkdir(parents=True)
    environment.stamp.write_text(environment.fingerprint())
    assert environment.is_current()
    (packages / "torch").rmdir()
    os.utime(
        packages, ns=(0, environment.stamp.stat().st_mtime_ns + 1)
    )  # clocks of files tick in milliseconds
    assert not environment.is_current()


def test_an_environment_of_another_python_or_half_made_is_made_anew(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environment.usable()
    environment.unfinished.touch()
    assert not environment.usable()
    environment.unfinished.unlink()
    (environment.folder / "pyvenv.cfg").write_text("version = 3.12.1\n")
    assert not environment.is_current()
    Path(environment.python).unlink()
    Path(environment.python).symlink_to(repository.ROOT / "removed")
    assert not environment.usable()
    assert "Python is gone" in capsys.readouterr().out


def test_nothing_goes_on_installing_after_an_interrupt(tmp_path: Path) -> None:
    # Both processes below narrate() hold the FIFO open, so its end is the end of the last of them.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = (
        f"import subprocess, sys; fifo = open({str(fifo)!r}, 'w');"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=fifo);"
        "print('started', file=fifo, flush=True); p.wait()"
    )
    parent = (
        "import signal, sys; from tools.processes import narrate;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"narrate('it', [sys.executable, '-c', {child!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stderr=subprocess.DEVNULL)
    with fifo.open() as held:
        assert held.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert held.read() == ""
    assert process.wait() != 0


# Releases ---------------------------------------------------------------------------------------------------


def test_a_bump_reaches_every_version_pin_and_the_changelog(checkout: Path) -> None:
    assert bump(["0.2.0"])
    texts = {file: file.read_text() for file in repository.MANIFESTS}
    assert one_version(texts) == "0.2.0"
    assert all('"0.1.0"' not in text and "==0.1.0" not in text for text in texts.values())
    assert "## [Unreleased]\n\n## [0.2.0] - 20" in (checkout / "CHANGELOG.md").read_text()


def test_a_bump_refuses_versions_that_do_not_agree(checkout: Path) -> None:
    file = checkout / "packages" / "npu" / "pyproject.toml"
    file.write_text(file.read_text().replace("stepscope==0.1.0", "stepscope==0.0.9"))
    before = file.read_text()
    with pytest.raises(SystemExit, match=r"npu/pyproject.toml: 0\.0\.9, 0\.1\.0"):
        bump(["0.2.0"])
    assert file.read_text() == before


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "0.1.0", "1.2.3rc1"])
def test_a_bump_refuses_what_is_no_new_version(checkout: Path, version: str) -> None:
    with pytest.raises(SystemExit, match="version"):
        bump([version])


# Real engines -----------------------------------------------------------------------------------------------


@pytest.fixture
def recipes(checkout: Path) -> Path:
    folder = checkout / "packages/rollout-vllm/tests/engines"
    for name in ("vllm-2", "vllm-1"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm-2" / "requirements.txt").write_text("vllm==2\n")
    (folder / "vllm-1" / "over.txt").write_text("vllm-2\n")
    return folder


def test_an_engine_of_another_version_builds_upon_the_recipe_it_names(recipes: Path, checkout: Path) -> None:
    framework = checkout / "packages/core/tests/engines/verl-1"
    framework.mkdir(parents=True)
    (framework / "over.txt").write_text("vllm-2\n")
    known = engines()
    assert sorted(known) == ["verl-1", "vllm-1", "vllm-2"]
    assert known["verl-1"].under == known["vllm-1"].under == known["vllm-2"]
    assert known["vllm-2"].under == environments.DEV


def test_a_recipe_of_a_dependency_group_stands_by_itself(recipes: Path, environment: Environment) -> None:
    (recipes / "docs").mkdir()
    (recipes / "docs" / "group.txt").write_text("docs\n")
    docs = engines()["docs"]
    assert (docs.under, docs.groups) == (None, ("docs",))
    docs.folder.mkdir()
    (docs.folder / "pyvenv.cfg").write_text("version = 3.11.7\n")
    before = docs.fingerprint()
    settings = repository.ROOT / "pyproject.toml"
    settings.write_text(settings.read_text().replace('"mkdocs-material', '"mkdocs", "mkdocs-material'))
    assert docs.fingerprint() != before


def test_the_newest_engine_is_that_of_the_highest_version(recipes: Path) -> None:
    (recipes / "vllm-1.10").mkdir()
    (recipes / "vllm-1.9").mkdir()
    assert newest("vllm").folder.name == ".venv-vllm-2"
    (recipes / "vllm-10").mkdir()
    assert newest("vllm").folder.name == ".venv-vllm-10"
    (recipes / "torch-npu").mkdir()
    assert newest("torch") is environments.DEV
    assert newest("torch-npu").folder.name == ".venv-torch-npu"


def test_an_engine_that_is_left_to_request_is_run_by_its_name_alone(
    recipes: Path,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (recipes / "vllm-1" / "on_request.txt").write_text("an hour.\n")
    monkeypatch.setattr(dev, "DEV", environment)
    monkeypatch.setattr(
        EngineEnvironment, "ready", lambda environment: f"/bin/true {environment.recipe.name}"
    )
    monkeypatch.setattr(engine_tests, "run_tests", lambda *command, **_: print(command[0]) is None)
    assert left_to_request() == {"vllm-1": "an hour."}
    assert engine_tests.test_engines([])
    assert capfd.readouterr().out.split() == ["/bin/true", "vllm-2"]
    assert dev.test(["--engines"])
    assert capfd.readouterr().out.split() == ["/bin/true", "vllm-1", "/bin/true", "vllm-2"]


@pytest.mark.parametrize(
    ("built_for", "possible"), [("None", ["vllm-1", "vllm-2"]), ("'13.0'", ["vllm-2"])], ids=["CPU", "CUDA"]
)
def test_an_engine_that_needs_torch_for_the_cpu_is_left_out_beside_another_one_with_the_reason(
    built_for: str,
    possible: list[str],
    recipes: Path,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (recipes / "vllm-1" / "cpu_torch.txt").write_text("it needs the CPU build.\n")
    torch = environment.folder / "lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {built_for}\n")
    environment.stamp.touch()
    ran: list[str] = []

    def run(python: str, *_: str, **__: object) -> bool:
        ran.append(python)
        return True

    monkeypatch.setattr(environments, "DEV", environment)
    monkeypatch.setattr(dev, "DEV", environment)
    monkeypatch.setattr(Environment, "ready", lambda made: made.folder.name)
    monkeypatch.setattr(engine_tests, "run_tests", run)
    assert list(unasked()) == possible
    assert dev.test(["--engines"])
    assert ran == [f".venv-{name}" for name in possible]
    shown = capfd.readouterr().out
    assert ("the CPU build." in shown) is (len(possible) == 1)
    assert dev.test(["--engines", "vllm-1"]) is ("vllm-1" in possible)


def test_the_collector_is_set_in_each_process_of_the_tests_on_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    paths = engine_tests.quick_start()
    assert paths.split(os.pathsep)[1:] == [str(tmp_path)]
    command = [sys.executable, "-c", "import gc; print(gc.get_threshold()[0])"]
    environment = {**os.environ, "PYTHONPATH": paths}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "1000000\n"


def test_every_test_on_something_real_runs_in_some_environment() -> None:
    ours = {file for environment in engines().values() for file in environment.tests}
    files = {file for package in PACKAGES for file in (package / "tests" / "real").glob("test_*.py")}
    assert len(files) > 10
    assert not {file for file in files if not {file, file.parent} & ours}


def test_a_changed_recipe_is_noticed(
    recipes: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "DEV", environment)
    before = engines()["vllm-1"].fingerprint()
    (recipes / "vllm-2" / "bare.txt").write_text("xgrammar==1\n")
    assert engines()["vllm-1"].fingerprint() != before


def test_what_an_engine_builds_upon_is_ready_before_its_own_set_up_takes_the_lock(
    recipes: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(made: Environment) -> None:
        (made.folder / "bin").mkdir(parents=True, exist_ok=True)
        (made.folder / "bin" / "python").touch()
        (made.folder / "pyvenv.cfg").touch()
        made.stamp.write_text(made.fingerprint())
        built.append(made.folder.name)

    monkeypatch.setattr(environments, "DEV", environment)
    monkeypatch.setattr(Environment, "build", build)
    engines()["vllm-1"].ready()
    assert built == [".venv-vllm-2", ".venv-vllm-1"]


def test_a_set_up_waits_for_none_of_another_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with environments.lock():
        monkeypatch.setattr(repository, "ROOT", ROOT / "packages" / "core")  # a folder with such a file
        with environments.lock():
            assert capsys.readouterr().out == ""


STAND_IN = """
import os, signal, sys
print(os.getpid(), *sys.argv[1:], flush=True)
{then}
"""
"""Program in the place of the dev.py that tests the engines."""


def test_engines_are_tested_beside_other_tests_and_their_output_and_failures_follow(
    recipes: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    then = "open(os.environ['DEV_FAILED_TESTS'], 'w').write('$ pytest\\n    test_it\\n'); sys.exit(1)"
    (checkout / "dev.py").write_text(STAND_IN.format(then=then))
    monkeypatch.setattr(processes, "FAILED", ["$ ruff"])
    with engine_tests.engines_beside() as passed:
        print("other tests", flush=True)
        assert not passed()
    output = capfd.readouterr().out
    assert output.index("other tests") < output.index(" --engines vllm-1 vllm-2")
    assert processes.FAILED == ["$ ruff", "$ pytest", "    test_it"]


def test_the_tests_beside_others_end_with_those(recipes: Path, checkout: Path) -> None:
    started = checkout / "started"
    os.mkfifo(started)
    (checkout / "dev.py").write_text(
        STAND_IN.format(then=f"open({str(started)!r}, 'w').write(str(os.getpid())); signal.pause()")
    )
    with pytest.raises(KeyboardInterrupt), engine_tests.engines_beside():
        process = int(started.read_text())
        os.kill(process, 0)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.slow
def test_what_failed_is_said_again_at_the_end_with_its_tests(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_bad.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    monkeypatch.setattr(processes, "FAILED", [])
    monkeypatch.setattr(Environment, "ready", lambda environment: sys.executable)
    monkeypatch.setattr(dev, "check", lambda arguments: processes.run("false"))
    assert not dev.test(["--no-engines", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)])
    output = capfd.readouterr().out.splitlines()
    assert output[-5:-3] == [f"dev.py: FAILED: {part}" for part in ("the check", "the tests")]
    assert output[-3] == "$ false"
    assert output[-2].startswith("$ ")
    assert output[-1] == "    test_bad.py::test_bad"


@pytest.mark.slow
def test_a_test_that_fails_only_beside_others_is_named_and_passes(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the process that runs this
    lines = ("import os", "def test_it(): assert 'PYTEST_XDIST_WORKER' not in os.environ", "")
    (tmp_path / "test_beside.py").write_text("\n".join(lines))
    shutil.copy(ROOT / "conftest.py", tmp_path)
    monkeypatch.setattr(processes, "FAILED", [])
    monkeypatch.setattr(Environment, "ready", lambda environment: sys.executable)
    monkeypatch.setattr(dev, "check", lambda arguments: True)
    assert dev.test(["--no-engines", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)])
    assert "AGAIN: test_beside.py::test_it" in capfd.readouterr().out
    assert processes.FAILED == []


@pytest.mark.slow
@pytest.mark.parametrize(("needed", "passes"), [(1, True), (2, False)])
def test_a_test_on_an_engine_that_fails_once_is_named_and_passes(
    needed: int,
    passes: bool,
    recipes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    body = f"    with open('ran', 'a') as ran: ran.write('x')\n    assert os.stat('ran').st_size > {needed}\n"
    (tmp_path / "test_late.py").write_text(f"import os\ndef test_it():\n{body}")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr(processes, "FAILED", [])
    monkeypatch.setattr(EngineEnvironment, "ready", lambda environment: sys.executable)
    monkeypatch.setattr(EngineEnvironment, "tests", ["test_late.py"])
    assert engine_tests.test_engines(["vllm-2"]) is passes
    assert (tmp_path / "ran").read_text() == "xx"
    named = "PASSED ONLY WHEN RUN AGAIN: test_late.py::test_it"
    assert (named in capfd.readouterr().out) is passes
    assert bool(processes.FAILED) is not passes


@pytest.mark.slow
def test_a_test_that_kills_its_process_runs_once_and_fails_the_run(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    body = "    print('begins', file=open('begins', 'a'))\n    os._exit(3)\n"
    (tmp_path / "test_dies.py").write_text(f"import os\ndef test_it():\n{body}")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr(processes, "FAILED", [])
    monkeypatch.setattr(Environment, "ready", lambda environment: sys.executable)
    monkeypatch.setattr(dev, "check", lambda arguments: True)
    assert not dev.test(["--no-engines", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)])
    assert (tmp_path / "begins").read_text() == "begins\n"
    last = capfd.readouterr().out.splitlines()[-2:]
    assert last[0].strip() == "test_dies.py::test_it"
    assert last[1].endswith("Not properly terminated")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "ran"), [([], 1), (["--slow"], 2), (["."], 2), (["-n1"], 1)])
def test_pytest_without_a_path_leaves_out_what_is_slow(tmp_path: Path, words: list[str], ran: int) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_it(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = slow\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"{ran} passed" in done.stdout, done.stdout + done.stderr


def test_an_engine_that_cannot_be_set_up_fails_the_run_by_name_and_the_others_still_run(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ready(environment: EngineEnvironment) -> str:
        if environment.recipe.name == "vllm-1":
            sys.exit("the package index cannot be reached")
        return "true"

    monkeypatch.setattr(EngineEnvironment, "ready", ready)
    assert not engine_tests.test_engines([])
    output = capfd.readouterr().out
    assert "cannot be reached" in output
    assert "pytest packages/rollout-vllm/tests/real" in output
    assert "set up: vllm-1" in output
    assert engine_tests.test_engines(["vllm-2", "-x"])
