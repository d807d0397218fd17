"""`dev.py gpu`: its results, limits and stand-ins. What only a GPU can show, it shows there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needed_at_the_top
from stepscope.backends.cuda_memory import summarise
from tests.tree import CORE, REPORT, ROOT, project
from tools.gpu import parts, smi
from tools.gpu.page import LARGEST_BYTES, PRETENDED, keep_small, write_results
from tools.gpu.results import Record, Result, read_result
from tools.gpu.standin_smi import VALUES
from tools.gpu.trace_files import Work, busy_ns
from tools.gpu.wheels import CORE as WHEELS

SMI = [sys.executable, str(ROOT / "tools/gpu/standin_smi.py")]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "result.json", Result("traces", "of kernels", on_a_gpu=True))


def test_the_wheels_are_those_that_the_core_and_its_command_require() -> None:
    of_the_report = {line for line in project(REPORT)["dependencies"] if not line.startswith("stepscope")}
    assert {*WHEELS} == {*project(CORE)["dependencies"]} | of_the_report


@pytest.mark.parametrize("module", ["calculator", "model", "rollout", "task", "worker"])
def test_what_it_takes_of_the_demo_imports_no_ray(module: str) -> None:
    assert "ray" not in needed_at_the_top(REPORT / f"src/stepscope_report/demo/{module}.py")


def test_a_result_is_on_disk_after_each_check(record: Record, tmp_path: Path) -> None:
    record.near("busy", 104.0, 100.0, unit="ms", source="CUDA events", within=0.05)
    record.near("busy", 106.0, 100.0, unit="ms", source="CUDA events", within=0.05)
    record.goal("ratio", 1.2, 1.05)
    result = read_result(tmp_path / "result.json")
    assert [check.agrees for check in result.checks] == [True, False]
    assert str(result.goals[0]).startswith("MISSED")
    assert result.sources == ["CUDA events"]


def test_both_files_say_that_nothing_ran_on_a_gpu(record: Record, tmp_path: Path) -> None:
    record.result.on_a_gpu = False
    record.check("a | b", 1, 1, source="torch", agrees=True)
    record.goal("ratio", 1.2, 1.05)
    write_results(tmp_path, [record.result], pretend=True, files=["report.html"])
    whole = json.loads((tmp_path / "gpu.json").read_text())
    assert (whole["notice"], whole["parts"][0]["on_a_gpu"]) == (PRETENDED, False)
    page = (tmp_path / "gpu.md").read_text()
    assert page.count(PRETENDED) == 5
    assert "not judged: ratio" in page
    assert "| yes | a / b | 1 | 1 | torch |" in page


def test_a_part_fails_if_nothing_was_compared_or_a_source_disagrees(record: Record, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\nthe reason\n")
    states = []
    for agrees, code in ((None, 0), (True, 0), (False, 0), (True, 1), (True, None)):
        result = Result("traces", "")
        if agrees is not None:
            Record(tmp_path / "other.json", result).check("a", 1, 2, source="torch", agrees=agrees)
        parts._conclude(result, code, log, len("before\n"))
        states.append((result.state, "the reason" in (result.error or "")))
    assert states == [
        ("failed", False),
        ("passed", False),
        ("failed", False),
        ("failed", True),
        ("late", True),
    ]


def test_a_part_that_is_too_slow_ends_with_all_that_it_started() -> None:
    child = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        int(process.stdout.readline())
        assert parts._end_of(process, 0.05) is None
        assert process.stdout.read() == b""  # nobody holds its output any more


def test_a_folder_that_is_too_large_loses_the_timeline_first(tmp_path: Path) -> None:
    for name in ("gpu.json", "timeline.json.gz", "log.txt"):
        with (tmp_path / name).open("wb") as file:
            os.truncate(file.fileno(), LARGEST_BYTES // 2)
    assert keep_small(tmp_path, ["timeline.json.gz", "log.txt"]) == ["timeline.json.gz"]
    assert (tmp_path / "log.txt").exists()


def test_overlapping_kernels_are_busy_once() -> None:
    works = [Work("a", 0, 10), Work("b", 5, 12), Work("c", 6, 7), Work("d", 20, 21)]
    assert busy_ns(works) == 13


def test_readings_of_nvidia_smi_are_numbers_or_none() -> None:
    (row,) = smi.query(SMI, ["power.draw", "fan.speed"])
    assert {field: smi.number(text) for field, text in row.items()} == {
        "power.draw": 321.0,
        "fan.speed": None,
    }
    with smi.Readings(SMI, ["power.draw"], "0", 0.01) as readings:
        pass
    assert readings.error is None
    first, last = readings.rows[0][0], readings.rows[-1][0]
    assert readings.median("power.draw", first, last) == float(VALUES["power.draw"])
    assert readings.median("power.draw", last + 1, last + 2) is None


@pytest.mark.needs("torch")
def test_the_snapshot_of_the_standin_is_as_large_as_its_own_numbers() -> None:
    from tools.gpu.standin_allocator import Allocator

    allocator = Allocator()
    allocator.record()
    held = [allocator.allocate(1 << 20) for _ in range(3)]
    held.pop()
    (device,) = summarise(allocator.snapshot(), 100).devices
    assert (device.peak_bytes, device.end_bytes) == (allocator.most, allocator.allocated)
    assert device.end_reserved_bytes == allocator.reserved == 3 << 20


@pytest.mark.needs("torch")
def test_a_pretended_part_runs_in_a_process_of_its_own_and_says_so_on_every_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.gpu",
        "--pretend",
        "--parts",
        "machine",
        "--output",
        str(tmp_path),
    ]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    assert all(line.startswith(f"[{PRETENDED}] ") for line in made.stdout.splitlines())
    assert json.loads((tmp_path / "gpu.json").read_text())["failed"] == []


@pytest.mark.needs("torch")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-m", "tools.gpu", "--output", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert made.returncode == 1
    assert "Fix: --pretend" in made.stdout
