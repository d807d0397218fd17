"""Reports in several processes: the same numbers, and what a process that dies costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from threading import Event

import msgspec
import pytest
from typer.testing import CliRunner

from packages.report.tests import golden
from packages.report.tests.test_kernels import step_with_traces
from stepscope_report.cli.app import app
from stepscope_report.timeline import load_step, load_traces, processes
from stepscope_report.timeline.processes import results, workers


@pytest.fixture
def two() -> Iterator[Executor]:
    with workers(2, 0) as executor:
        assert executor is not None
        yield executor


def die_elsewhere(parent: int) -> int:
    """Kill the process, unless it is the parent."""
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return parent


def no_memory_elsewhere(parent: int) -> int:
    if os.getpid() != parent:
        raise MemoryError
    return parent


def no_space(path: str) -> None:
    raise OSError(28, "No space left on device", path)


def loud(word: str) -> str:
    print(word)
    return word


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.steps())
def test_a_recorded_step_is_read_the_same_in_two_processes(name: str, two: Executor) -> None:
    path = golden.steps()[name]
    timeline = load_step(path)
    alone, together = (
        msgspec.json.encode(load_traces(path, timeline, executor=executor, digests=False))
        for executor in (None, two)
    )
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("function", [die_elsewhere, no_memory_elsewhere])
def test_what_a_child_cannot_do_this_process_does(two: Executor, function: Callable[[int], object]) -> None:
    parts = [os.getpid()] * 4
    assert list(results(two, function, parts, [[]] * 4)) == parts


def test_an_error_in_a_child_is_the_callers(two: Executor) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        list(results(two, no_space, ["trace.json"], [[]]))
    assert (raised.value.errno, raised.value.filename) == (28, "trace.json")


@pytest.mark.slow
def test_what_a_reader_prints_is_not_among_the_commands_output(
    two: Executor, capfd: pytest.CaptureFixture[str]
) -> None:
    assert two.submit(loud, "here").result() == "here"
    assert "here" not in capfd.readouterr().out


WAITS = """
import sys, time
from stepscope_report.timeline.processes import workers

if __name__ == "__main__":
    with workers(2, 0) as executor:
        waiting = executor.submit(time.sleep, 600)
        print("begun", flush=True)
        waiting.result()
"""


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    with subprocess.Popen(
        [sys.executable, program], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):  # the last child ends a moment later
        for _ in range(600):
            os.killpg(process.pid, 0)
            Event().wait(0.05)


def test_jobs_are_processes_and_small_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for load, idle in ((0.2, 6), (13.1, 3), (40.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert processes.idle_cores() == idle
    for jobs, size in ((None, processes.SMALL - 1), (1, processes.SMALL), (None, processes.SMALL)):
        with workers(jobs, size) as executor:
            assert executor is None


@pytest.mark.parametrize(("name", "value"), [("executable", None), ("frozen", True)])
def test_without_an_interpreter_of_its_own_a_program_reads_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    with workers(2, 0) as executor:
        assert executor is None


def test_the_command_takes_jobs(tmp_path: Path) -> None:
    path = step_with_traces(tmp_path).write()
    texts = [
        CliRunner().invoke(app, ["report", str(path), "--json", "--no-digests", "--jobs", jobs]).stdout
        for jobs in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert '"traces"' in texts[0]
