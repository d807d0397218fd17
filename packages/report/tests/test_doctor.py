"""`stepscope doctor`: rows that tell the truth about this machine, and about machines that are worse off.

One file above 400 lines: this machine, worse ones and hostile ones are told by the same rows.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.report.tests.commands import Command
from stepscope.config import ProfileConfig
from stepscope_report import doctor as machine
from stepscope_report.cli import doctor as command
from stepscope_report.cli.doctor import GROUP, clock_row, engines, examine, nodes
from stepscope_report.doctor import Row, libraries

Usage = namedtuple("Usage", "total used free")


def rows_of(config: Path | None = None) -> dict[str, Row]:
    return {row.subject: row for row in examine(config)}


def test_a_red_row_without_a_fix_is_no_row() -> None:
    with pytest.raises(ValueError, match="'disk' needs"):
        Row(subject="disk", state="red", found="full")


# This machine -----------------------------------------------------------------------------------------------


@pytest.mark.needs("torch")
@pytest.mark.needs("ray")
def test_on_this_machine_it_names_what_is_installed() -> None:
    import torch

    rows = rows_of()
    assert rows["python"].found.startswith(sys.version.split()[0])
    assert rows["stepscope"].state == "green"
    assert rows["torch"].found.startswith(torch.__version__)
    assert rows["torch.profiler"].state == "green"
    without_device = "absent" if torch.version.cuda is None else "amber"
    assert rows["CUDA"].state == ("green" if torch.cuda.is_available() else without_device)
    assert (rows["ray"].state, rows["ray"].found) == ("green", version("ray"))


@pytest.mark.usefixtures("without_torch")
def test_each_thing_that_is_wrong_with_the_configuration_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("steps: soon\nmode: quick\n")
    rows = [row for row in examine(path) if row.subject == "configuration"]
    assert [row.found.partition(" ")[0] for row in rows] == ["steps", "mode"]
    assert all(row.state == "red" and row.fix for row in rows)


def test_without_torch_it_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "torch" else spec(name))
    row = rows_of()["torch"]
    assert (row.state, row.fix) == ("absent", None)
    assert "not installed" in row.found


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks torch, which takes seconds."""
    monkeypatch.setattr(libraries, "torch", lambda environ: iter(()))


def put_nsys(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program called nsys on PATH."""
    put(folder / "nsys", f"#!/bin/sh\n{script}\n".encode())
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "nsys"


def put_torch(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module called torch on the path of processes that start."""
    (folder / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("without_torch")
def test_its_exit_code_and_its_json_agree(command: Command, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("steps: [2]\nmode: sometimes\n")
    rows = command("doctor", wrong, "--json", code=1).json["rows"]
    (row,) = [row for row in rows if row["state"] == "red"]
    assert row["subject"] == "configuration"
    assert "mode is 'sometimes'" in row["found"]


def test_a_wrong_setting_does_not_hide_that_the_save_path_of_the_file_is_wrong_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(f"steps: [a]\nsave_path: {tmp_path}/file/out\n")

    def row_of(file: Path) -> tuple[str, bool]:
        (row,) = [row for row in examine(file) if row.subject == "save_path"]
        return row.state, str(tmp_path) in row.found

    assert row_of(wrong) == ("red", True)
    monkeypatch.setenv("STEPSCOPE_SAVE_PATH", str(tmp_path / "out"))
    assert row_of(wrong) == ("green", True)
    wrong.write_text("save_path: 7\n")
    monkeypatch.delenv("STEPSCOPE_SAVE_PATH")
    assert row_of(wrong) == ("amber", False)


@pytest.mark.usefixtures("without_torch")
def test_the_screen_shows_each_fix_below_its_finding(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"save_path: {tmp_path}/out\n")
    shown = command("doctor", config).out
    assert "note  configuration" in shown
    assert "fix: set steps:" in shown
    assert "failing" in shown


# Machines that are worse off --------------------------------------------------------------------------------


def test_what_is_gone_old_or_of_another_version_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = libraries.recorded_from_outside({"NVTX_INJECTION64_PATH": "/opt/gone.so"})
    assert (row.state, "/opt/gone.so" in row.found) == ("red", True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert [libraries.nsys(tool).state for tool in ("torch", "nsys")] == ["absent", "red"]
    monkeypatch.setattr(libraries, "installed", lambda _: "2.44.1")
    assert libraries.ray().state == "red"
    monkeypatch.setattr(machine, "installed", {"stepscope": "0.2.0", "stepscope-npu": "0.1.0"}.get)
    row = machine.own_packages()
    assert row.state == "red"
    assert str(row.fix).split()[2:] == ["stepscope==0.2.0", "stepscope-npu==0.2.0"]
    (tmp_path / "file").touch()
    row = machine.save_path(ProfileConfig(save_path=str(tmp_path / "file" / "out")))
    assert (row.state, "Not a directory" in row.found) == ("red", True)


def test_shm_that_is_small_missing_or_closed_has_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
        small = machine.shared_memory()
    assert (small.state, "--shm-size" in str(small.fix)) == ("amber", True)
    monkeypatch.setattr(machine, "SHARED_MEMORY", str(tmp_path / "none"))
    missing = machine.shared_memory()
    assert (missing.state, "mount -t tmpfs" in str(missing.fix)) == ("amber", sys.platform == "linux")
    monkeypatch.setattr(machine, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    closed = machine.shared_memory()
    assert (closed.state, "cannot write" in closed.found) == ("red", True)


@pytest.mark.parametrize(("free_mb", "state"), [(500, "red"), (1500, "amber"), (4000, "green")])
def test_a_disk_is_held_against_the_budget(
    free_mb: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free_mb << 20))
    row = machine.save_path(ProfileConfig(save_path=str(tmp_path), budget={"trace_mb": 2048}))
    assert row.state == state


def test_a_torch_that_cannot_be_imported_is_red_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "Failed to load the backend extension: torch_npu: libascend_hal.so"
    put_torch(tmp_path, f"raise RuntimeError('{why}')\n", monkeypatch)
    monkeypatch.setattr(libraries, "find_spec", lambda name: object())
    (row,) = libraries.torch({})
    assert row.state == "red"
    assert "libascend_hal.so" in row.found
    assert "_AUTOLOAD=0" in str(row.fix)


GPU = {
    "version": "2.13.0", "built_for": "13.0", "cuda": True, "devices": ["NVIDIA H100"] * 8,
    "activities": ["CPU", "CUDA"], "cpu_events": 9, "device_events": 0,
}  # fmt: skip


def test_an_nsys_on_path_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = put_nsys(tmp_path, "echo NVIDIA Nsight Systems version 2026.2.1", monkeypatch)
    row = libraries.nsys("nsys")
    assert (row.state, "version 2026.2.1, " in row.found, str(program) in row.found) == ("green", True, True)


@pytest.mark.parametrize(
    ("answer", "environ", "subject", "state", "helps"),
    [
        ({}, {"NSYS_PROFILING_SESSION_ID": "7"}, "CUPTI", "red", "NSYS_PROFILING_SESSION_ID is set"),
        ({}, {}, "CUDA", "green", "8 device(s): NVIDIA H100"),
        ({"cuda": False, "devices": []}, {}, "CUDA", "amber", "nvidia-smi"),
    ],
    ids=["who else records", "devices", "no device"],
)
def test_what_torch_answers_is_judged(
    answer: dict[str, object], environ: dict[str, str], subject: str, state: str, helps: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(libraries, "find_spec", lambda name: object())
    monkeypatch.setattr(libraries, "ask_torch", lambda: GPU | answer)
    row = {row.subject: row for row in libraries.torch(environ)}[subject]
    assert row.state == state
    assert helps in f"{row.found} {row.fix}"


def test_a_torch_without_an_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_torch(tmp_path, "print('{}')\nraise SystemExit(0)\n", monkeypatch)
    with pytest.raises(libraries.ProbeError, match="printed no answer"):
        libraries.ask_torch()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", None)
        with pytest.raises(libraries.ProbeError, match="cannot be started"):
            libraries.ask_torch()

    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(libraries.ProbeError, match="within 120 s"):
        libraries.ask_torch()


@pytest.mark.parametrize(("level", "user", "states"), [("2", 1000, []), ("4", 1000, ["amber"]), ("4", 0, [])])
def test_a_kernel_that_lets_nsys_sample_nothing_is_noted(
    level: str, user: int, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paranoid").write_text(f"{level}\n")
    monkeypatch.setattr(libraries, "PARANOID", tmp_path / "paranoid")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert [row.state for row in libraries.nsys_permissions()] == states


@pytest.mark.parametrize(
    ("version", "state", "finding"),
    [
        ("0.32.0+cpu", "green", "mine-cpu 0.32.0+cpu; the adapter supports mine 0.8.5 to 0.33.0"),
        ("0.33.0.post1", "green", "mine-cpu 0.33.0.post1; "),
        ("0.8.4", "red", "too old; the adapter supports mine 0.8.5"),
        ("0.99.0.dev3", "amber", "newer than any that was tested"),
        ("damaged", "red", "the metadata of mine-cpu names no version"),
        (None, "absent", "Servers elsewhere can be driven from here"),
    ],
)
def test_an_engine_is_compared_with_the_range_of_its_adapter(
    version: str | None, state: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = adapter_in(tmp_path, monkeypatch, f"{__name__}:engine_of_mine")
    monkeypatch.setattr(command, "installed", {"mine-cpu": version}.get)
    monkeypatch.setattr(command, "entry_points", lambda group: [point])
    row = next(row for row in engines() if row.subject == "mine")
    assert row.state == state
    assert finding in row.found
    assert row.fix or state not in ("red", "amber")


def test_an_engine_without_an_adapter_that_works_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "entry_points", lambda group: ())
    monkeypatch.setattr(command, "find_spec", lambda name: object() if name == "vllm" else None)
    rows = {row.subject: row for row in engines()}
    assert (rows["vllm"].state, rows["sglang"].state) == ("amber", "absent")
    assert "'stepscope[vllm]'" in str(rows["vllm"].fix)
    point = adapter_in(tmp_path, monkeypatch, "nowhere_at_all:factory")
    monkeypatch.setattr(command, "entry_points", lambda group: [point])
    row = {row.subject: row for row in engines()}["mine"]
    assert (row.state, "nowhere_at_all" in str(row.fix)) == ("red", True)


@pytest.mark.parametrize(
    ("value", "state", "finding"),
    [("json:dumps", "green", "1.0: mine (stepscope.engines)"), ("nowhere_at_all:x", "red", "ModuleNot")],
)
def test_a_package_that_extends_stepscope_is_listed(
    value: str, state: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_in(tmp_path, monkeypatch, value)
    (row,) = (row for row in machine.plug_ins() if row.subject == "my-adapter")
    assert row.state == state
    assert finding in row.found


class EngineOfMine:
    distributions = ("mine", "mine-cpu")


engine_of_mine = EngineOfMine()


def adapter_in(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> EntryPoint:
    """Install a distribution that registers the adapter `mine`; return its entry point."""
    info = folder / "my_adapter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-adapter\nVersion: 1.0\nProvides-Extra: engine\n"
        "Requires-Dist: stepscope\nRequires-Dist: httpx>=9; extra == 'other'\n"
        "Requires-Dist: mine<=0.33.0,>=0.8.5; extra == 'engine'\n"
    )
    (info / "entry_points.txt").write_text(f"[stepscope.engines]\nmine = {value}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    (point,) = (point for point in machine.entry_points("stepscope.engines") if point.name == "mine")
    return point


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        ("exit 127", "ended with 127: it printed nothing"),
        ("echo cannot open libQt5Core.so >&2; exit 1", "libQt5Core.so"),
        ("echo wrapper; exit 0", "ended with 0: wrapper"),
        ("printf '\\377\\376'; exit 3", "ended with 3"),
        ("exec sleep 60", "timed out after"),
    ],
)
def test_an_nsys_that_does_not_work_is_not_ok(
    script: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nsys(tmp_path, script, monkeypatch)
    monkeypatch.setattr(libraries, "NSYS_S", 0.3 if "sleep" in script else 30)
    assert libraries.nsys("nsys").state == "red"
    row = libraries.nsys("torch")
    assert row.state == "amber"
    assert finding in row.found


def test_a_row_is_one_line_that_every_terminal_and_json_can_take() -> None:
    row = Row(subject="s\udcff", state="red", found="a\n\x1b[31mb\udcff" + "x" * 9000, fix="\x00")
    assert row.subject == "s\\udcff"
    assert row.found.startswith("a \\x1b[31mb\\udcff")
    assert len(row.found) < 1100
    msgspec.json.encode(row)


def test_a_package_whose_metadata_is_damaged_is_named_and_hides_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[stepscope.backends]\nno equals sign\n")
    before = {point.name for point in machine.entry_points("stepscope.backends")}
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = machine.damaged_packages()
    assert row.state == "red"
    assert "broken-1.0.dist-info" in row.found
    assert {point.name for point in machine.entry_points("stepscope.backends")} >= before


# Hostile surroundings.

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
VARIABLES = (
    "PATH", "HOME", "TMPDIR", "LANG", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID", "VLLM_TORCH_PROFILER_DIR", "STEPSCOPE_CONFIG", "STEPSCOPE_STEPS",
    "STEPSCOPE_SAVE_PATH", "STEPSCOPE_TOOL", "STEPSCOPE_TORCH", "STEPSCOPE_BUDGET", "STEPSCOPE_ROLES",
    "STEPSCOPE_BUDGET__SECONDS", "STEPSCOPE_INSTRUMENT", "STEPSCOPE_FINISH__MIRROR", "STEPSCOPE_NOTHING",
    "STEPSCOPE_RAISE", "STEPSCOPE_RANK", "RANK", "ASCEND_HOME_PATH", "LD_LIBRARY_PATH",
)  # fmt: skip
HOSTILE = st.one_of(
    TEXT,
    st.sampled_from(
        (
            "", " ", "/", "/dev/null/x", "/dev/zero", "/proc/self/mem", "~nobody/x", "$HOME", "-1", "nan",
            "1e999", "[" * 4000, "{", "[{}]", '{"a": {}}', "a" * 5000, "..", "\udcff/x", "a\nb", ":::",
            ".:" * 500, "s3://user:secret@host/x", "not://a/url", "every:0", "5:1", "9" * 400, "nsys", "npu",
        )
    ),
)  # fmt: skip
NAMES = ("stepscope", "torch", "ray", "vllm", "sglang", "nvtx", "stepscope_npu", "other")


@st.composite
def surroundings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "environ": draw(st.dictionaries(st.sampled_from(VARIABLES), HOSTILE, max_size=5)),
        "config": draw(st.none() | st.binary(max_size=200) | st.sampled_from((b"steps: [2]\n", b"folder"))),
        "nsys": draw(
            st.none() | st.binary(max_size=40) | st.sampled_from((b"#!/bin/sh\nexit 9\n", b"folder"))
        ),
        "packages": draw(
            st.lists(
                st.tuples(
                    st.sampled_from(NAMES),
                    st.sampled_from(("1.0", "", "x y", "9" * 50, "2.60.0+é", "-")),
                    st.none() | st.binary(max_size=60) | st.just(b"[stepscope.engines]\nvllm\n"),
                    st.none() | st.binary(max_size=60),
                ),
                max_size=3,
            )
        ),
        "shared_memory": draw(st.sampled_from(("/dev/shm", "/nowhere/shm", "/dev/null", "/proc/self/mem"))),
    }


@pytest.mark.slow
@given(around=surroundings())
@settings(max_examples=20 if settings().max_examples == 100 else settings().max_examples)
def test_no_surroundings_end_it_and_each_trouble_has_a_fix(around: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for key, value in around["environ"].items():
            patch.setenv(key, value)
        patch.setattr(libraries, "torch", lambda environ: iter(()))  # a process of seconds
        patch.setattr(libraries, "NSYS_S", 2.0)
        patch.setattr(machine, "SHARED_MEMORY", around["shared_memory"])
        patch.chdir(folder)
        put(folder / "config.yaml", around["config"])
        put(folder / "bin" / "nsys", around["nsys"])
        patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
        for package, version_, points, metadata in around["packages"]:
            info = folder / f"{package}-{version_ or '0'}.dist-info".replace("/", "_")
            info.mkdir(exist_ok=True)
            text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version_}\n".encode()
            (info / "METADATA").write_bytes(text if metadata is None else metadata)
            if points is not None:
                (info / "entry_points.txt").write_bytes(points)
        patch.syspath_prepend(folder)
        file = None if around["config"] is None else folder / "config.yaml"
        rows = list(examine(file))
        assert [row for row in rows if row.state in ("red", "amber") and not row.fix] == []
        assert [row for row in rows if "the check failed" in row.found] == []
        assert {"python", "stepscope", "configuration", "save_path", "nsys"} <= {row.subject for row in rows}
        msgspec.json.encode(rows)


def put(path: Path, content: bytes | None) -> None:
    """A file, or a folder in its place."""
    if content is None:
        return
    path.parent.mkdir(exist_ok=True)
    if content == b"folder":
        path.mkdir()
    else:
        path.write_bytes(content)
        path.chmod(0o755)


@pytest.mark.usefixtures("without_torch")
def test_a_package_adds_its_rows_and_one_that_raises_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name="broken", value="nowhere_at_all:rows", group=GROUP),
        EntryPoint(name="mine", value=f"{__name__}:rows_of_mine", group=GROUP),
    ]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    entry_points = machine.entry_points
    monkeypatch.setattr(
        machine, "entry_points", lambda group: points if group == GROUP else entry_points(group)
    )
    rows = rows_of()
    assert rows["broken"].state == "red"
    assert "ModuleNotFoundError" in rows["broken"].found
    assert rows["mine of mine"].state == "green"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(("tool", "state"), [("npu", "red"), ("torch", "absent")])
def test_a_torch_npu_that_is_absent_is_red_where_the_tool_is_npu(
    tool: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint(name="npu", value=f"{__name__}:rows_of_npu", group=GROUP)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    npu = EntryPoint(name="npu", value="stepscope_npu:NpuBackend", group="stepscope.backends")
    points = {GROUP: [point], "stepscope.backends": [npu]}
    entry_points = machine.entry_points
    monkeypatch.setattr(machine, "entry_points", lambda group: [*points.get(group, []), *entry_points(group)])
    path = tmp_path / "c.yaml"
    path.write_text(f"tool: {tool}\nsteps: [1]\n")
    row = next(row for row in examine(path) if row.subject == "torch_npu")
    assert row.state == state
    assert ("install torch-npu" in str(row.fix)) == (state == "red")


def rows_of_npu() -> list[Row]:
    return [Row(subject="torch_npu", state="absent", found="not installed")]


def rows_of_mine() -> list[Row]:
    return [Row(subject="mine of mine", state="green", found="here")]


# A cluster --------------------------------------------------------------------------------------------------


@pytest.mark.needs("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_the_clock_of_a_node_is_measured() -> None:
    summary, node = nodes("auto")
    assert (summary.state, summary.found) == ("green", "1 node(s) at auto")
    assert node.state == "green"
    assert re.search(r"clock [+-]\d+\.\d+ ms .* within \d", node.found)


def test_a_clock_that_is_far_off_is_noted_with_its_uncertainty() -> None:
    row = clock_row("node a", (11_560_000_000, 200_000))
    assert row.state == "amber"
    assert re.search(r"clock \+11560\.000 ms .* 0\.200 ms", row.found)
