"""Merges and reports in several processes: the same bytes, and what a worker that dies costs."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from packages.core.tests import golden
from packages.core.tests.test_kernels import step_with_traces
from packages.core.tests.test_merge_rows import step
from packages.core.tests.traces import op, write_trace
from stepscope.cli.app import app
from stepscope.timeline import Merged, load_step, load_traces, merge_bytes, merge_step
from stepscope.timeline.activity.reading import TracePart, read_part
from stepscope.timeline.execution import workers
from stepscope.timeline.execution.calls import WorkerDiedError, WorkerFailedError
from stepscope.timeline.execution.child_processes import CODE, ChildProcesses, command_of

PATCHED = """
import functools, os, signal, time
from stepscope.timeline.{module} import {name} as real
import stepscope.timeline.{module} as module
@functools.wraps(real)
def patched(part):
    {body}
    return real(part)
module.{name} = patched
"""
DEADLY = "if 'trace_pid1001' in repr(part) and not os.path.exists({flag!r}): os.kill(os.getpid(), 9)"
DEADLY_ONCE = """if 'trace_pid1001' in repr(part) and not os.path.exists({flag!r}):
        open({flag!r}, 'x').close()
        os.kill(os.getpid(), 9)"""
WRITE = ("merge.row_parts", "write_part")
READ = ("activity.reading", "read_part")


def part_of(path: Path) -> TracePart:
    return TracePart(path=path, name=path.name, sidecar=None, torch=True)


def patched(of: tuple[str, str], body: str) -> list[str]:
    """Return the command of a child in which a function does `body` first."""
    module, name = of
    command = command_of(f"exec({PATCHED.format(module=module, name=name, body=body)!r}); {CODE}")
    assert command is not None
    return command


@pytest.fixture
def two() -> Iterator[ChildProcesses]:
    with ChildProcesses(2) as executor:
        yield executor


def merged(path: Path, to: Path, executor: Executor | None = None) -> tuple[Merged, bytes]:
    outcome = merge_step(path, to=to, executor=executor)
    return outcome, to.read_bytes()


TOGETHER = """
import sys, threading
from pathlib import Path
from stepscope.timeline.activity.reading import TracePart, read_part
from stepscope.timeline.execution.calls import answer_to, call_of, result_of

sys.setswitchinterval(1e-6)
part = TracePart(path=Path(sys.argv[1]), name="t.json", sidecar=None, torch=True)
answer, ready = answer_to(call_of(read_part, (part,))), threading.Barrier(6)

def read():
    ready.wait()
    result_of(answer, read_part)

threads = [threading.Thread(target=read) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_answers_of_a_new_type_that_come_together_do_not_crash(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [op("aten::mm", 1000, 5)])
    command = [sys.executable, "-c", TOGETHER, str(path)]
    assert [subprocess.run(command, timeout=60).returncode for _ in range(8)] == [0] * 8


@pytest.mark.parametrize("name", golden.steps())
def test_a_recorded_step_gives_the_same_bytes_in_two_processes(
    name: str, two: ChildProcesses, tmp_path: Path
) -> None:
    path = golden.steps()[name]
    (outcome, together_bytes), (expected, alone_bytes) = (
        merged(path, tmp_path / "timeline.json.gz", executor) for executor in (two, None)
    )
    assert outcome == expected
    assert gzip.decompress(together_bytes).splitlines() == gzip.decompress(alone_bytes).splitlines()
    assert together_bytes == alone_bytes
    timeline = load_step(path)
    alone, together = (
        msgspec.json.encode(load_traces(path, timeline, executor=executor)) for executor in (None, two)
    )
    assert together == alone


def test_a_broken_step_with_odd_names_gives_the_same_bytes_in_two_processes(
    two: ChildProcesses, tmp_path: Path
) -> None:
    path = step(tmp_path)
    read: list[int] = []
    alone = merged(path, tmp_path / "timeline.json.gz")
    outcome = merge_step(path, to=tmp_path / "two.json.gz", executor=two, on_read=read.append)
    assert (outcome, (tmp_path / "two.json.gz").read_bytes()) == alone
    assert sum(read) == merge_bytes(path)
    assert len(outcome.problems) > 2
    assert not list(tmp_path.glob(".*"))


def test_any_executor_gives_the_same_bytes(tmp_path: Path) -> None:
    path = step(tmp_path)
    alone = merged(path, tmp_path / "timeline.json.gz")
    with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2, get_context("spawn")) as processes:
        assert merged(path, tmp_path / "2.json.gz", threads) == alone
        assert merged(path, tmp_path / "3.json.gz", processes) == alone


def test_a_worker_that_dies_costs_nothing_if_the_second_lives(tmp_path: Path) -> None:
    path = step(tmp_path)
    alone = merged(path, tmp_path / "timeline.json.gz")
    flag = str(tmp_path / "died")
    with ChildProcesses(2, patched(WRITE, DEADLY_ONCE.format(flag=flag))) as executor:
        assert merged(path, tmp_path / "two.json.gz", executor) == alone
    assert Path(flag).exists()


def test_a_row_whose_workers_die_twice_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    path = step(tmp_path)
    alone, text = merged(path, tmp_path / "timeline.json.gz")
    with ChildProcesses(2, patched(WRITE, DEADLY.format(flag=""))) as executor:
        outcome, rest = merged(path, tmp_path / "two.json.gz", executor)
    lost = {p.file for p in outcome.problems if p.what == "left out: twice, its process ended with code -9"}
    assert {file.file for file in alone.files} - {file.file for file in outcome.files} == lost
    assert any("trace_pid1001" in file for file in lost)
    assert set(gzip.decompress(rest).splitlines()[:-1]) < set(gzip.decompress(text).splitlines())
    assert not list(tmp_path.glob(".*"))


def test_a_trace_whose_readers_die_twice_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = step_with_traces(tmp_path).write()
    with ChildProcesses(2, patched(READ, DEADLY.format(flag=""))) as executor:
        traces = load_traces(path, load_step(path), executor=executor)
    assert [problem.what for problem in traces.problems] == [
        "not read: twice, its process ended with code -9"
    ]
    unread = [activity.file for activity in traces.activities if activity.content.events == 0]
    assert [Path(file).name for file in unread] == ["trace_pid1001.json.gz"]


def test_a_worker_without_memory_counts_as_dead(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", [op("aten::mm", 0, 5)])
    with ChildProcesses(1, patched(READ, "raise MemoryError")) as executor:
        error = executor.submit(read_part, part_of(path)).exception()
    assert isinstance(error, WorkerDiedError)


def test_an_error_in_a_worker_is_the_callers(tmp_path: Path) -> None:
    path = step(tmp_path)
    with (
        ChildProcesses(1, patched(WRITE, "raise OSError(28, 'full', part.to)")) as executor,
        pytest.raises(OSError, match="No space left") as raised,
    ):
        merge_step(path, executor=executor)
    assert raised.value.errno == 28
    with (
        ChildProcesses(1, patched(WRITE, "raise KeyError('a mistake')")) as executor,
        pytest.raises(WorkerFailedError, match="a mistake"),
    ):
        merge_step(path, executor=executor)
    assert not list(path.glob(".*"))
    assert not (path / "timeline.json.gz").exists()


def test_where_no_process_can_be_started_the_work_is_done_here(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", [op("aten::mm", 0, 5)])
    with ChildProcesses(2, [str(tmp_path / "nothing")]) as executor:
        assert executor.submit(read_part, part_of(path)).result()[0].content.events == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("executable", None), ("frozen", True), ("path", [Path("/nowhere"), "/n\udcff\u00ef", *sys.path])],
)
def test_an_odd_interpreter_costs_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    path = write_trace(tmp_path / "a.json", [op("aten::mm", 0, 5)])
    monkeypatch.setattr(sys, name, value, raising=False)
    with ChildProcesses(1) as executor:
        assert executor.submit(read_part, part_of(path)).result()[0].content.events == 1


INTERRUPTED = """
import sys
from stepscope.timeline import merge_step
from stepscope.timeline.execution.child_processes import ChildProcesses
with ChildProcesses(2, {command!r}) as executor:
    merge_step(sys.argv[1], executor=executor)
"""


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    path = step(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    busy = f"open(part.to, 'w').close(); open({str(pipe)!r}, 'w').close(); time.sleep(600)"
    command = [sys.executable, "-c", INTERRUPTED.format(command=patched(WRITE, busy)), str(path)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        pipe.read_bytes()  # until a worker writes
        assert list(path.glob(".row*"))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert not list(path.glob(".*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_jobs_are_processes_and_small_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for load, idle in ((0.2, 6), (13.1, 3), (40.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert workers.idle_cores() == idle
    for jobs, size in ((None, workers.SMALL - 1), (1, workers.SMALL), (None, workers.SMALL)):
        with workers.workers(jobs, size) as executor:
            assert executor is None
    with workers.workers(2, 0) as executor:
        assert isinstance(executor, ChildProcesses)


def test_the_commands_take_jobs(tmp_path: Path) -> None:
    path = step_with_traces(tmp_path).write()
    texts = []
    for jobs in ("1", "2"):
        assert CliRunner().invoke(app, ["merge", str(path), "--jobs", jobs]).exit_code == 0
        report = CliRunner().invoke(app, ["report", str(path), "--json", "--jobs", jobs])
        texts.append((path.joinpath("timeline.json.gz").read_bytes(), report.stdout))
    assert texts[0] == texts[1]
    assert '"traces"' in texts[0][1]
