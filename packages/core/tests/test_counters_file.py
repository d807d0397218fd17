"""The file of counters: whole after a capture, readable after a kill, and named in the manifest."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture, span
from stepscope._recording.counters import devices
from stepscope._recording.counters import log as log_module
from stepscope._recording.counters.sampler import Sampler
from stepscope.backends.counters import CounterSource
from stepscope.files import clock
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Expectation
from stepscope.files.manifest_parts import read_parts
from stepscope.files.sidecar import ProcessInfo
from stepscope_report.timeline import load_step
from stepscope_report.timeline.sources import CounterFile, read_counters


def config(folder: Path, **settings: object) -> ProfileConfig:
    counters = settings or {"hz": 50}
    return ProfileConfig(
        save_path=str(folder), steps=[1], record="off", roles={"*": {"profiler": "off"}}, counters=counters
    )


def work(seconds: float = 0.2) -> None:
    """Compute for that time of a processor: on a busy machine it takes longer, and so leaves samples too."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def layout(folder: Path) -> StepLayout:
    return RunLayout(folder).step(1)


def file_of(folder: Path) -> CounterFile:
    (path,) = layout(folder).counters.glob("*.jsonl")
    return read_counters(path)


def entry(folder: Path) -> Expectation:
    (part,) = read_parts(layout(folder))[0]
    (item,) = [item for item in part.expected if item.kind == "counters"]
    return item


def test_a_capture_leaves_a_whole_file_on_its_own_clock(tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    with capture(1, config=config(tmp_path)), span("update"):
        work()
    ended_ns = time.monotonic_ns()
    file = file_of(tmp_path)
    assert file.problems == {}
    assert file.header is not None
    assert file.end is not None
    assert file.end.samples == len(file.samples) > 3
    assert began_ns < file.header.anchor.mono_ns <= file.samples[0].at_ns
    assert file.samples[-1].at_ns < ended_ns
    assert entry(tmp_path) == Expectation(name="counters", kind="counters", state="ok")
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_the_values_stand_on_the_timeline_where_they_were_sampled(tmp_path: Path) -> None:
    with capture(1, config=config(tmp_path)), span("update"):
        work()
    timeline, file = load_step(layout(tmp_path).root), file_of(tmp_path)
    (cpu,) = [counter for counter in timeline.counters if counter.name == "process CPU"]
    assert file.header is not None
    assert cpu.times_ns[0] - timeline.window.start_ns == pytest.approx(
        file.samples[0].at_ns - file.header.anchor.mono_ns, abs=2_000_000
    )
    assert timeline.window.start_ns <= cpu.times_ns[0] < cpu.times_ns[-1]


@pytest.mark.parametrize("off", ["off", False, {"hz": 0}])
def test_off_leaves_no_file_and_no_thread(tmp_path: Path, off: object) -> None:
    made = ProfileConfig(
        save_path=str(tmp_path), steps=[1], roles={"*": {"profiler": "off"}}, counters=off  # type: ignore[arg-type]  # a parameter
    )  # fmt: skip
    with capture(1, config=made), span("update"):
        work(0.05)
    assert not layout(tmp_path).counters.exists()
    (part,) = read_parts(layout(tmp_path))[0]
    assert [item.name for item in part.expected if item.kind == "counters"] == []


CHILD = """
import sys, time
from stepscope import ProfileConfig, capture, span
config = ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}})
cap = capture(1, config=config).open()
with span("hang"):
    began = time.monotonic()
    while time.monotonic() < began + 2.5:
        time.sleep(0.01)
    print(time.monotonic_ns(), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_its_counters_but_for_the_last_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killed_ns = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    file = file_of(tmp_path)
    assert file.end is None
    assert file.problems == {}
    assert file.samples[-1].at_ns > killed_ns - 1_200_000_000, "a second, and a tick"
    timeline = load_step(layout(tmp_path).root)
    assert {counter.name for counter in timeline.counters} >= {"process CPU", "process memory"}
    assert entry(tmp_path).state == "missing"


def test_a_machine_without_a_library_says_so_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "DRIVER", "/proc/self/stat")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with capture(1, config=config(tmp_path)), span("update"):
        work(0.05)
    item = entry(tmp_path)
    assert item.state == "ok"  # a counter that a machine lacks is no problem
    assert [note.endswith(f": {devices.MISSING}") for note in item.notes] == [True]
    end = file_of(tmp_path).end
    assert end is not None
    assert end.absent == {"NVIDIA GPUs": devices.MISSING}


@pytest.mark.slow
def test_a_full_disk_is_the_reason_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    monkeypatch.setattr(log_module, "WRITE_NS", 0)
    taken = 0

    def write(handle: int, data: memoryview) -> int:
        nonlocal taken
        taken += 1
        if taken > 5:
            real(handle, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    with capture(1, config=config(tmp_path)), span("update"):
        work(0.5)
    monkeypatch.undo()
    item = entry(tmp_path)
    assert item.state == "partial"
    assert "No space left" in (item.reason or "")
    file = file_of(tmp_path)
    assert file.problems == {}, "no half line"
    assert file.samples


@pytest.mark.slow
def test_the_file_of_a_counter_that_does_not_answer_is_closed_once_it_does(tmp_path: Path) -> None:
    asked, answers = threading.Event(), threading.Event()

    class Slow(CounterSource):
        name, unit = "slow", ""

        def sample(self) -> dict[str, float]:
            asked.set()
            answers.wait()
            return {"": 1.0}

    process = ProcessInfo(role="actor", rank=0, world_size=1, host="a", pid=1)
    sampler = Sampler({"own": lambda: [Slow()]})
    log = log_module.CounterLog(
        tmp_path / "counters.jsonl", sampler, process=process, step=1, run_id="feed0004", hz=50
    )
    log.prepare()
    log.open()
    log.start(clock.read_anchor())
    assert asked.wait(60)
    log.close(clock.read_anchor())
    assert "did not answer" in str(log.failed)
    assert str(log.path) in open_files()
    answers.set()
    assert sampler.stop(60)
    assert str(log.path) not in open_files()


def open_files() -> set[str]:
    numbers = Path("/proc/self/fd").iterdir()
    return {os.readlink(number) for number in numbers if number.is_symlink()}


@pytest.mark.slow
def test_samples_beyond_the_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "MOST_SAMPLES", 3)
    with capture(1, config=config(tmp_path)), span("update"):
        work(1.0)
    file = file_of(tmp_path)
    assert len(file.samples) == 3
    assert file.end is not None
    assert file.end.dropped > 0
    assert entry(tmp_path).state == "partial"


def test_the_child_of_a_fork_samples_nothing(tmp_path: Path) -> None:
    with capture(1, config=config(tmp_path)), span("update"):
        work(0.05)
        assert pauses() >= 1
        child = os.fork()
        if child == 0:
            os._exit(pauses())
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def pauses() -> int:
    return sum(isinstance(callback, partial) for callback in gc.callbacks)


def test_two_captures_of_a_step_have_two_files(tmp_path: Path) -> None:
    for _ in range(2):
        with capture(1, config=config(tmp_path)), span("update"):
            work(0.05)
    assert len(list(layout(tmp_path).counters.glob("*.jsonl"))) == 2
    timeline = load_step(layout(tmp_path).root)
    assert len([counter for counter in timeline.counters if counter.name == "process CPU"]) == 1


async def test_a_cancelled_opening_that_goes_on_in_its_thread_samples_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are opened on a thread, which knows nothing of the cancellation. The caller waits for it."""
    reached, goes_on, over = threading.Event(), threading.Event(), threading.Event()
    prepare = log_module.CounterLog.prepare

    def prepare_late(log: log_module.CounterLog) -> None:
        reached.set()
        goes_on.wait(20)
        prepare(log)
        over.set()

    monkeypatch.setattr(log_module.CounterLog, "prepare", prepare_late)
    opening = asyncio.create_task(capture(1, config=config(tmp_path)).aopen())
    assert await asyncio.to_thread(reached.wait, 20)
    opening.cancel()
    await asyncio.sleep(0)  # the opening learns of it here
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert over.is_set()
    for thread in samplers():
        thread.join(10)
    assert samplers() == []


def samplers() -> list[threading.Thread]:
    threads = threading.enumerate()  # also one whose start a signal interrupted
    return [thread for thread in threads if thread.name == "stepscope-counters" and thread.is_alive()]
