"""Tests of torch_npu's real analysis on recordings of its real C++, and of their merged timelines.

The stand-in for CANN records the mstx ranges, and the stand-in for msprof invents a device task for each.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packages.npu.tests.real.cann.build import build, environment, make_home
from stepscope.errors import BackendError
from stepscope.files.layout import RunLayout
from stepscope_npu import _doctor
from stepscope_npu._analysis import NpuAnalyser, analyse, analysed
from stepscope_npu._doctor import rows
from stepscope_report.cli.app import run
from tests.tree import ROOT

pytestmark = pytest.mark.needs("torch_npu")
MS = 1_000_000


@pytest.fixture(scope="module")
def over_fake_cann(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    libraries = build(tmp_path_factory.mktemp("cann"))
    return environment(libraries, home=make_home(tmp_path_factory.mktemp("home")), more={})


@pytest.fixture(scope="module")
def captured(over_fake_cann: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three steps whose recordings are not analysed."""
    folder = tmp_path_factory.mktemp("captured") / "run"
    script = str(Path(__file__).with_name("record.py"))
    done = subprocess.run(
        [sys.executable, script, str(folder)], env=over_fake_cann, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def told(captured: Path, over_fake_cann: dict[str, str]) -> str:
    """Return the output of `stepscope analyse` on that run, with the published msprof-analyze on PATH."""
    environ = over_fake_cann | {"PATH": f"{Path(sys.executable).parent}:{over_fake_cann['PATH']}"}
    assert shutil.which("msprof-analyze", path=environ["PATH"]) is not None
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "analyse", str(captured)],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def here_is_cann(over_fake_cann: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in over_fake_cann.keys() - os.environ.keys() | {"PATH"}:
        monkeypatch.setenv(name, over_fake_cann[name])


def the_recording(captured: Path, step: int) -> Path:
    [folder] = RunLayout(captured).step(step).traces.rglob("*_ascend_pt")
    return folder


def merged(captured: Path, step: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    layout = RunLayout(captured).step(step)
    code = run(["merge", str(layout.root)])
    assert "unaligned" not in capsys.readouterr().out
    timeline = json.loads(gzip.decompress(layout.timeline.read_bytes()))
    return code, timeline["traceEvents"] if isinstance(timeline, dict) else timeline


def the_slice(events: list[dict[str, Any]], name: str) -> tuple[int, int]:
    """Return (start, end) in ns of the last slice with this name."""
    slices = [event for event in events if event["ph"] == "X" and event["name"] == name]
    start = round(slices[-1]["ts"] * 1000)
    return start, start + round(slices[-1]["dur"] * 1000)


def test_a_run_that_is_not_analysed_says_so(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = NpuAnalyser().waiting(captured)
    assert waiting == [the_recording(captured, step) for step in (1, 2, 3)]
    run(["merge", str(RunLayout(captured).step(1).root)])
    assert "run `stepscope analyse`" in " ".join(capsys.readouterr().out.split())


def test_an_analysis_that_takes_too_long_is_ended(captured: Path, here_is_cann: None) -> None:
    folder = the_recording(captured, 1)
    with pytest.raises(BackendError, match=r"than 0\.01 s"):
        analyse(folder, timeout_s=0.01)
    assert analysed(folder) == []


def test_the_whole_run_is_analysed_and_merged_where_it_was(
    captured: Path, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert NpuAnalyser().waiting(captured) == []
    for step in (1, 2):
        _, events = merged(captured, step, capsys)
        span, marker = the_slice(events, "inner"), the_slice(events, "actor.inner")
        operator, kernel = the_slice(events, "aten::mm"), the_slice(events, "fake_kernel_3")
        assert span[0] <= marker[0] <= marker[1] <= span[1] + MS
        assert span[0] - MS <= operator[0] <= operator[1] <= span[1] + MS
        assert marker[0] <= kernel[0] <= kernel[1] <= marker[1]
        names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
        assert "NPU 0 stream 0" in names


def test_msprof_analyze_is_asked_too_and_what_it_writes_is_kept_and_named(captured: Path, told: str) -> None:
    joined = "".join(told.split())  # the output breaks lines at any place
    for step in (1, 3):
        recording = the_recording(captured, step)
        files = [path for path in (recording / "msprof_analyze").rglob("*") if path.is_file()]
        assert sorted(path.suffix for path in files) == [".html", ".xlsx"]
        assert all(path.stat().st_size and str(path.relative_to(recording)) in joined for path in files)
    assert "://" not in told  # the tool's own output, with its banner, is not shown


def test_what_msprof_analyze_cannot_read_is_said_to_have_come_to_nothing(captured: Path, told: str) -> None:
    """msprof-analyze reads text exports only, and step 2 is a database."""
    assert not (the_recording(captured, 2) / "msprof_analyze").exists()
    assert "profiler.db,msprof-" in "".join(told.split())


def test_a_recording_without_cann_data_is_merged_where_it_was_too(
    captured: Path, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch_npu places its events early, by the difference of CLOCK_MONOTONIC and CLOCK_MONOTONIC_RAW."""
    _, events = merged(captured, 3, capsys)
    span, operator = the_slice(events, "inner"), the_slice(events, "aten::mm")
    assert span[0] - MS <= operator[0] <= operator[1] <= span[1] + MS


def test_a_daemon_may_have_it_analysed(captured: Path, here_is_cann: None, tmp_path: Path) -> None:
    """torch_npu refuses to analyse in a daemon, such as a worker of vLLM. `analyse` starts a process."""
    program = (
        "import multiprocessing, sys\nfrom pathlib import Path\nfrom stepscope_npu._analysis import analyse\n"
        "def work():\n    print(len(analyse(Path(sys.argv[1]), timeout_s=200)), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('fork').Process(target=work, daemon=True)\n"
        "    process.start()\n    process.join()\n"
    )
    fresh = tmp_path / "copy_ascend_pt"
    subprocess.run(["cp", "-r", str(the_recording(captured, 1)), str(fresh)], check=True)
    subprocess.run(["rm", "-rf", str(fresh / "ASCEND_PROFILER_OUTPUT")], check=True)
    done = subprocess.run([sys.executable, "-c", program, str(fresh)], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_doctor_sees_this_torch_npu_with_cann_and_the_trap_without(
    here_is_cann: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_doctor, "_DEADLINE_S", 240)  # an import of torch takes long on a busy machine
    states = {row.subject: row.state for row in rows()}
    assert (states["torch_npu"], states["CANN"], states["msprof"]) == ("green", "green", "green")
    for name in ("LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name)
    without = {row.subject: row for row in rows()}
    assert without["torch_npu"].state == "red"
    assert "libhccl.so" in without["torch_npu"].found
    assert without["TORCH_DEVICE_BACKEND_AUTOLOAD"].state == "red"
