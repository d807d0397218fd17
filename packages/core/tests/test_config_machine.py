"""Checks of the machine before the run. Permissions do not stop root; /proc and files do."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from packages.core.tests.runs import python
from packages.report.tests.commands import Command
from stepscope.config import ProfileConfig, check_save_path, check_tool
from stepscope.errors import ConfigError


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_checking_a_folder_that_is_not_there_leaves_no_trace(tmp_path: Path) -> None:
    check_save_path(ProfileConfig(save_path=tmp_path / "a" / "b"), on_ray=False)
    assert everything_in(tmp_path) == []


def test_checking_a_folder_that_is_there_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    check_save_path(ProfileConfig(save_path=tmp_path), on_ray=True)
    assert everything_in(tmp_path) == [tmp_path / "run.json"]


def test_processes_that_check_at_the_same_time_do_not_disturb_one_another(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path / "a" / "b")
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check_save_path, config, on_ray=False) for _ in range(200)]:
            done.result()
    assert everything_in(tmp_path) == []


def test_a_relative_path_is_right_where_all_share_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_save_path(ProfileConfig(save_path="outputs/profile"), on_ray=False)
    assert everything_in(tmp_path) == []


def test_a_relative_path_on_ray_is_refused_and_the_fix_is_the_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fix = f"write save_path: {tmp_path}/outputs/profile"
    with pytest.raises(ConfigError, match=f"'outputs/profile'.*{fix}"):
        check_save_path(ProfileConfig(save_path="outputs/profile"), on_ray=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "not a folder"),
        ("file/a/b", "Not a directory"),
        ("link", "not a folder"),
        ("x" * 300, "name too long"),
    ],
    ids=["a file", "below a file", "a link to nowhere", "a long name"],
)
def test_a_path_that_can_be_no_folder_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=why):
        check_save_path(ProfileConfig(save_path=tmp_path / name), on_ray=False)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, where nobody can make a folder, is Linux's")
@pytest.mark.parametrize("path", ["/proc", "/proc/stepscope/profile"])
def test_a_folder_that_cannot_be_written_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"save_path is '{path}'"):
        check_save_path(ProfileConfig(save_path=path), on_ray=False)


@pytest.mark.parametrize("folder", [".", "run"])
def test_a_disk_that_takes_no_bytes_is_refused(tmp_path: Path, folder: str) -> None:
    # A file size limit of 0 behaves like a full disk: files can be made and not filled.
    code = """
import resource, sys
from stepscope.config import ProfileConfig, check_save_path
from stepscope.errors import ConfigError
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    check_save_path(ProfileConfig(save_path=sys.argv[1]), on_ray=False)
except ConfigError as error:
    print(error)
"""
    assert "(File too large)" in python(code, tmp_path / folder)
    assert everything_in(tmp_path) == []


@pytest.fixture
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with two backends, of which one would fail to load."""
    info = tmp_path / "fake_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[stepscope.backends]\nnsys = nowhere:Backend\ntorch = nowhere:Backend\n"
    )
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)]
    )


@pytest.mark.usefixtures("backends")
def test_an_installed_tool_is_accepted_without_loading_it() -> None:
    check_tool(ProfileConfig(tool="nsys"))


@pytest.mark.usefixtures("backends")
def test_a_tool_that_is_not_installed_names_those_that_are_and_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"'npu'; .*nsys.*\[npu\]"):
        check_tool(ProfileConfig(tool="npu"))


@pytest.mark.parametrize(
    ("tool", "fix"),
    [
        ("torhc", r"did you mean 'torch'\? If not, install the package"),
        ("mine", "install the package whose entry points `stepscope.backends` name 'mine'"),
    ],
)
@pytest.mark.usefixtures("backends")
def test_a_tool_that_nobody_registered_says_how_to_add_it(tool: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{tool}'; allowed: .*Fix: {fix}"):
        check_tool(ProfileConfig(tool=tool))


def test_a_source_path_without_an_installation_has_no_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'torch'; .* install stepscope$"):
        check_tool(ProfileConfig())


def test_checking_the_tool_does_not_import_torch() -> None:
    code = """
import sys
from contextlib import suppress
from stepscope.config import ProfileConfig, check_tool
from stepscope.errors import ConfigError
with suppress(ConfigError):  # a checkout that is not installed has no entry points
    check_tool(ProfileConfig())
print("torch" in sys.modules)
"""
    assert python(code) == "False\n"


def test_what_others_end_by_a_finalizer_at_exit_still_ends_before_python_waits_for_it(tmp_path: Path) -> None:
    """vLLM's engine is a child process that only a finalizer ends, and multiprocessing waits for children."""
    code = """
import sys
from stepscope.config import ProfileConfig, check_save_path
check_save_path(ProfileConfig(save_path=sys.argv[1]), on_ray=False)
import multiprocessing, weakref
class Engine: pass
fork = multiprocessing.get_context("fork")
over = fork.Event()
fork.Process(target=over.wait).start()
engine = Engine()
weakref.finalize(engine, over.set)
"""
    python(code, tmp_path / "new")


@pytest.mark.parametrize(
    ("setting", "absent", "fix"),
    [
        ("tool: nsys", None, "install Nsight Systems"),
        ("tool: npu", "torch_npu", "pip install torch-npu"),
        ("finish: {report_to: [tensorboard]}", "tensorboard", "pip install 'stepscope[tensorboard]'"),
        ("finish: {report_to: [nosuch]}", None, "install the package that brings it"),
    ],
)
def test_validate_refuses_what_is_not_installed_here(
    setting: str,
    absent: str | None,
    fix: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec

    def spec_of(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == absent else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", spec_of)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(
        "stepscope_report.cli.run_program.check_tool", lambda config: None
    )  # stepscope-npu is there
    path = tmp_path / "stepscope.yaml"
    path.write_text(f"steps: [1]\n{setting}\n")
    assert fix in " ".join(command("validate", path, code=2).err.split())
