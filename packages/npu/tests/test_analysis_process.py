"""Tests of the process of an analysis: its errors, its files, and its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from stepscope.errors import BackendError
from stepscope_npu import _analysis
from stepscope_npu._analysis import NpuAnalyser, advise, analyse

WRITES = """
output = Path(sys.argv[1], "ASCEND_PROFILER_OUTPUT")
output.mkdir()
(output / "trace_view.json").write_text("[]")
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "capture_ascend_pt"
    folder.mkdir()
    (folder / "profiler_info_0.json").write_text("{}")
    return folder


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replace torch_npu's analysis by `program`, whose first argument is the recording."""
    monkeypatch.setattr(_analysis, "_PROGRAM", f"import sys\nfrom pathlib import Path\n{program}")


def ends(pid: int, within_s: float) -> bool:
    """Return whether a killed process ends in time. On a busy machine it still runs for a moment."""
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_where_there_is_no_torch_npu_it_says_so(recording: Path) -> None:
    with pytest.raises(BackendError, match="'torch_npu'"):
        analyse(recording, timeout_s=60)


def test_an_analysed_recording_is_left_alone(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = (
        "o = Path(sys.argv[1], 'ASCEND_PROFILER_OUTPUT'); o.mkdir(); (o / 'trace_view.json').write_text('[]')"
    )
    run_instead(monkeypatch, made)
    [first] = analyse(recording, timeout_s=60)
    assert analyse(recording, timeout_s=60) == [first]  # a second run's mkdir would fail
    assert NpuAnalyser().waiting(recording.parent) == []


def test_it_runs_without_what_msprof_or_torchs_own_loading_of_torch_npu_would_do_to_it(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROFILING_MODE", "PROFILER_SAMPLECONFIG"):
        monkeypatch.setenv(name, "dynamic")
    autoload = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    monkeypatch.delenv(autoload, raising=False)
    seen = "Path(sys.argv[1], 'seen').write_text('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"
    run_instead(monkeypatch, f"import os\n{seen}\n{WRITES}")
    analyse(recording, timeout_s=60)
    lines = (recording / "seen").read_text().splitlines()
    assert f"{autoload}=0" in lines
    assert not [line for line in lines if line.startswith("PROFIL")]


def test_recordings_that_are_still_being_made_or_moved_are_not_analysed(recording: Path) -> None:
    for above in (".recordings/process", ".export-1"):
        (recording.parent / above).mkdir(parents=True)
        shutil.copytree(recording, recording.parent / above / recording.name)
    assert NpuAnalyser().waiting(recording.parent) == [recording]


def test_half_a_timeline_of_an_analysis_that_was_ended_does_not_count(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = (
        "o = Path(sys.argv[1], 'ASCEND_PROFILER_OUTPUT'); o.mkdir(); (o / 'trace_view.json').write_text('[')"
    )
    written = recording / "written"
    os.mkfifo(written)
    told = "Path(sys.argv[1], 'written').write_text('')"
    run_instead(monkeypatch, f"{half}; {told}; import threading; threading.Event().wait()")

    def too_late(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        written.read_text()  # waits for half a timeline
        raise subprocess.TimeoutExpired("analyse", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", too_late)
    with pytest.raises(BackendError, match=r"than 3 s.*--timeout"):
        analyse(recording, timeout_s=3)
    assert NpuAnalyser().waiting(recording.parent) == [recording]


def test_a_process_that_the_analysis_has_started_ends_with_it(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = recording / "told"
    os.mkfifo(told)
    run_instead(
        monkeypatch,
        "import subprocess, threading\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "Path(sys.argv[1], 'told').write_text(str(child.pid))\n"
        "threading.Event().wait()",
    )
    pids: list[int] = []

    def too_late(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        pids.append(int(told.read_text()))  # waits for the child's pid
        raise subprocess.TimeoutExpired("analyse", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", too_late)
    with pytest.raises(BackendError, match="took longer"):
        analyse(recording, timeout_s=60)
    assert ends(pids[0], within_s=20)


@pytest.fixture
def adviser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a program as `msprof-analyze`, to test failures of this tool.

    `real/test_analysis.py` has the tests of the published msprof-analyze.
    """

    def install(program: str) -> None:
        tool = tmp_path / "msprof-analyze"
        tool.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{program}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_without_an_adviser_nothing_is_said_of_one(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert advise(recording, 60) == []


def test_an_adviser_gets_the_recording_and_a_folder_in_it_and_what_it_prints_is_not_shown(
    recording: Path, adviser: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    adviser(
        "print('secret', sys.argv[-4:-2] == ['-d', str(Path(sys.argv[-1]).parent)])\n"
        "log = Path(sys.argv[-1], 'log')\nlog.mkdir(parents=True)\n"
        "(log / 'a.xlsx').write_text('')\n(log.parent / 'advice.html').write_text(' '.join(sys.argv[1:3]))"
    )
    assert advise(recording, 60) == ["msprof_analyze/advice.html", "msprof_analyze/log/a.xlsx"]
    assert (recording / "msprof_analyze" / "advice.html").read_text() == "advisor all"
    assert "secret" not in "".join(capfd.readouterr())


def test_an_adviser_that_fails_costs_its_advice_alone_and_is_said(
    recording: Path, adviser: Callable[[str], None]
) -> None:
    adviser("Path(sys.argv[-1]).mkdir(); sys.exit(3)")
    assert "exited with 3" in advise(recording, 60)[0]
    assert not (recording / "msprof_analyze").exists()


@pytest.mark.slow
def test_an_adviser_that_does_not_end_is_ended(recording: Path, adviser: Callable[[str], None]) -> None:
    adviser("import threading; threading.Event().wait()")
    assert "too long" in advise(recording, 1)[0]
