"""Tests of the unmodified torch_npu, Python and C++, over a stand-in for CANN that gcc builds.

torch_npu cannot be imported without CANN, so each test starts a process that loads the stand-in.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from packages.npu.tests.real.cann.build import build, environment, make_home
from stepscope.files.manifest import Manifest
from stepscope_report.cli.app import run as cli
from tests.tree import ROOT

HERE = Path(__file__).parent
pytestmark = pytest.mark.needs("torch_npu")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cann"))


def start(libraries: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    more = {"FAKE_CANN_PROF": "1", "FAKE_CANN_DEVICES": "2", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(libraries, more=more),
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_backend_keeps_its_contract_on_the_real_code(libraries: Path, tmp_path: Path) -> None:
    home = make_home(tmp_path / "cann")
    (home / "lib64").symlink_to(libraries)  # torch_npu looks for MSPTI here, once per process
    scenes = [str(HERE / name) for name in ("over_fake_cann.py", "over_sglang.py")]
    installed = {"ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp")}
    pytest_on = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *scenes]
    done = start(libraries, *pytest_on, FAKE_CANN_LOG=str(tmp_path / "calls"), **installed)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("how", "code"),
    [("SIGTERM", -signal.SIGTERM), ("sys.exit", 3), ("an exception", 1)],
    ids=lambda value: str(value),
)
def test_a_process_that_leaves_an_open_capture_keeps_its_recording(
    libraries: Path, tmp_path: Path, how: str, code: int
) -> None:
    """torch_npu alone would lose a recording that is not stopped."""
    done = start(libraries, str(HERE / "leave.py"), str(tmp_path / "run"), how)
    assert done.returncode == code, done.stderr[-3000:]
    [folder] = (tmp_path / "run").glob("step_000002/traces/*/*_ascend_pt")
    assert b"aten::matmul" in (folder / "FRAMEWORK" / "torch.op_range").read_bytes()
    assert list(folder.glob("profiler_info*.json"))
    assert list(folder.glob("PROF_*/host/*.tsv"))


def test_a_live_run_records_the_next_step_when_it_is_asked_to(
    libraries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    training = subprocess.Popen(
        [sys.executable, str(HERE / "live.py"), str(run)],
        cwd=ROOT,
        env=environment(libraries, more={"FAKE_CANN_PROF": "1", "FAKE_CANN_DEVICES": "2"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with training:
        assert training.stdin is not None
        assert training.stdout is not None
        lines = (line.strip() for line in training.stdout)  # with lines that torch_npu prints
        for step in range(3):
            assert f"step {step}" in lines
            if step == 1:
                assert cli(["trigger", str(run), "--steps", "next", "--tool", "npu", "--wait", "120"]) == 0
            training.stdin.write("\n")
            training.stdin.flush()
        assert training.wait() == 0
    assert "heard" in capsys.readouterr().out
    [manifest] = run.glob("step_*/manifest.json")
    content = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    [window] = [item for part in content.processes for item in part.expected if item.name == "npu trace"]
    assert (content.step, window.state) == (1, "ok")
    [artifact] = window.artifacts
    folder = manifest.parent / artifact.path
    assert b"aten::matmul" in (folder / "FRAMEWORK" / "torch.op_range").read_bytes()
    [ranges] = folder.glob("PROF_*/host/*.tsv")
    assert "actor.update" in ranges.read_text()
