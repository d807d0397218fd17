"""Counters of a process against independent measurements: rusage, known allocations, a blocked event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from stepscope import ProfileConfig, capture, span
from stepscope._recording.counters.load import (
    GarbageShare,
    HostClaim,
    HostCpu,
    MemoryPressure,
    OpenFiles,
    ProcessCpu,
    ProcessMemory,
    ThreadCoreWait,
    garbage,
)
from stepscope._recording.spans.span import thread as of_spans
from stepscope.backends.counters import CounterSource
from stepscope.files.counters import EVENT_LOOP, GC, IN
from stepscope_report.event_loops import late_loops
from stepscope_report.timeline import Counter, load_step

MB = 1 << 20


def burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def test_the_cpu_counter_is_what_the_kernel_bills_the_process() -> None:
    source = ProcessCpu()
    used, began = used_s(), time.monotonic()
    burn(0.3)
    percent = source.sample()[""]
    used, passed = used_s() - used, time.monotonic() - began
    assert used > 0.29
    assert percent == pytest.approx(100 * used / passed, rel=0.05)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no sched-stats")
def test_the_waits_of_a_thread_are_those_that_the_kernel_tells_it() -> None:
    """The thread shares one core with a process that is as busy, so it waits for about half of the time."""
    source, told, ended = ThreadCoreWait(), list[float](), list[int]()

    def waited_ns() -> int:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ended.append(of_spans.id)  # as the first span of a thread asks for it
        busy = "import time; until = time.time() + 0.6\nwhile time.time() < until: pass"
        with subprocess.Popen([sys.executable, "-S", "-c", busy]):  # on the same core
            time.sleep(0.1)
            source.sample()
            began, before = time.monotonic_ns(), waited_ns()
            burn(0.15)
            percents = source.sample()
            told.append(percents[f"thread {threading.get_native_id()}"])
            told.append(100 * (waited_ns() - before) / (time.monotonic_ns() - began))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told[0] == pytest.approx(told[1], abs=5)
    assert told[0] > 20
    until = time.monotonic() + 10  # Python's thread ends a moment before the kernel's
    while f"thread {ended[0]}" in source.sample() and time.monotonic() < until:
        time.sleep(0.01)
    assert f"thread {ended[0]}" not in source.sample()
    source.close()


def test_memory_grows_by_what_is_allocated() -> None:
    source = ProcessMemory()
    before = source.sample()[""]
    block = bytearray(os.urandom(MB) * 64)
    grown = source.sample()[""] - before
    assert grown == pytest.approx(len(block), rel=0.1)


def test_open_files_are_counted() -> None:
    source = OpenFiles()
    before = source.sample()[""]
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(open(os.devnull))
        assert source.sample()[""] == before + 10
    assert source.sample()[""] == before


def test_the_pauses_of_the_collector_are_as_long_as_collections_take() -> None:
    before, times = len(gc.callbacks), list[int]()
    share, longest = garbage()
    gc.callbacks.append(lambda *_: times.append(time.monotonic_ns()))
    try:
        circles = [[] for _ in range(200_000)]  # type: ignore[var-annotated]  # lists of themselves
        for circle in circles:
            circle.append(circle)
        longest.sample()  # building them may have collected too
        share.sample()
        began = time.monotonic_ns()
        times.clear()
        gc.collect()
        took = times[1] - times[0]
        assert stopped_ns(share, began) == pytest.approx(took, rel=0.1)
        assert longest.sample()[""] == pytest.approx(took / 1e6, rel=0.1, abs=0.5)
    finally:
        gc.callbacks.pop()
        share.close()
    assert len(gc.callbacks) == before


def stopped_ns(share: CounterSource, since_ns: int) -> float:
    """Return the time in the collector since the previous sample, by all values of this sample."""
    last = share.sample()
    total = 0.0
    for at_ns, values in (*share.earlier(), (time.monotonic_ns(), last)):
        total += values[""] / 100 * (at_ns - since_ns)
        since_ns = at_ns
    return total


def test_a_long_run_of_the_collector_has_its_own_place_between_two_samples(config: ProfileConfig) -> None:
    """At two samples a second, the run lies anywhere between them."""
    rare = msgspec.structs.replace(config, counters=msgspec.structs.replace(config.counters, hz=2))
    circles = [[] for _ in range(200_000)]  # type: ignore[var-annotated]  # each run visits them
    with capture(1, config=rare):
        time.sleep(0.2)
        began = time.monotonic()
        while time.monotonic() < began + 0.1:
            gc.collect()
        took_s = time.monotonic() - began
        time.sleep(0.2)
    del circles
    share = counter(rare, GC)
    pieces = zip(pairwise(share.times_ns), share.values[1:], strict=True)
    long = [(end_ns - start_ns) / 1e9 for (start_ns, end_ns), percent in pieces if percent > 70]
    assert sum(long) == pytest.approx(took_s, rel=0.3)


def test_a_sample_within_a_collection_counts_what_has_passed_of_it() -> None:
    """A finalizer lets other threads run within a collection."""
    share = GarbageShare()
    within: list[float] = []

    class Finalized:
        def __del__(self) -> None:
            time.sleep(0.05)
            within.append(share.sample()[""])
            time.sleep(0.05)

    try:
        share.sample()
        circle = Finalized()
        circle.own = circle  # type: ignore[attr-defined]
        del circle
        gc.collect()
        share.sample()
        (first,), ((_, values),) = within, share.earlier()
        second = values[""]
        assert 50 < first <= 100
        assert 50 < second <= 100
    finally:
        share.close()


class Alarm(Exception):
    pass


def test_no_exception_of_a_signals_handler_is_lost_in_the_collector() -> None:
    """Python ignores what is raised in a callback of the collector, so no code of ours may run there."""
    fired = caught = 0

    def ring(*_: object) -> None:
        nonlocal fired
        fired += 1
        raise Alarm

    others, gc.callbacks[:] = gc.callbacks[:], []  # those of Hypothesis lose exceptions
    share, longest = garbage()
    previous = signal.signal(signal.SIGALRM, ring)
    draw = random.Random(0)
    try:
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 3e-5))
                for _ in range(10):
                    gc.collect(0)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                caught += 1
    finally:
        signal.signal(signal.SIGALRM, previous)
        share.sample()
        assert longest.sample()[""] > 0
        share.close()
        gc.callbacks[:] = others
    assert fired == caught > 500


@pytest.mark.slow
def test_the_host_is_at_least_as_busy_as_this_process(tmp_path: Path) -> None:
    source = HostCpu(HostClaim(str(tmp_path)))
    try:
        began = time.monotonic()
        burn(0.5)
        passed = time.monotonic() - began
        percent = source.sample()[""]
    finally:
        source.close()
    own = 100 * 0.5 / passed / (os.cpu_count() or 1)
    assert 0.8 * own < percent <= 100


def test_memory_pressure_is_the_time_in_which_all_programs_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=900\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    )
    file = tmp_path / "memory"
    file.write_text(lines.format(100))
    monkeypatch.setattr(MemoryPressure, "file", str(file))
    now_ns = iter([0, 10**9])
    monkeypatch.setattr("stepscope._recording.counters.load.time.monotonic_ns", lambda: next(now_ns))
    source = MemoryPressure()
    file.write_text(lines.format(250_100))
    assert source.sample() == {"": 25.0}


def test_one_process_of_a_host_samples_it() -> None:
    first, second = HostClaim("/run/step_000001"), HostClaim("/run/step_000001")
    assert (first.taken, second.taken) == (True, False)
    other = HostClaim("/run/step_000002")
    assert other.taken
    other.free()
    first.free()
    again = HostClaim("/run/step_000001")
    assert again.taken
    again.free()


def test_a_killed_process_gives_the_host_back() -> None:
    code = (
        "import time; from stepscope._recording.counters.load import HostClaim\n"
        "claim = HostClaim('/run/killed'); print(claim.taken, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        refused = HostClaim("/run/killed")
        process.kill()
        process.wait()
    claim = HostClaim("/run/killed")
    claim.free()
    assert (refused.taken, claim.taken) == (False, True)


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(
        save_path=str(tmp_path),
        steps=[1],
        roles={"*": {"profiler": "off"}},
        counters={"hz": 50},
    )


def counter(config: ProfileConfig, name: str) -> Counter:
    counters = load_step(f"{config.save_path}/step_000001").counters
    (only,) = [item for item in counters if item.name == name and IN not in item.of]
    return only


async def turns(config: ProfileConfig, block_s: float = 0) -> float:
    """Run a loop with spans, block it once, and return for how many ms it was blocked."""
    took_ms = 0.0
    async with capture(1, config=config):
        for number in range(10):
            async with span("turn"):
                await asyncio.sleep(0.03)  # ticks of the sampler come between
                if block_s and number == 5:
                    began = time.monotonic()
                    time.sleep(block_s)  # noqa: ASYNC251  # the tool that does not await
                    took_ms = (time.monotonic() - began) * 1000
    return took_ms


def test_a_loop_that_is_blocked_for_300_ms_is_late_by_300_ms(config: ProfileConfig) -> None:
    took_ms = asyncio.run(turns(config, block_s=0.3))
    late = counter(config, EVENT_LOOP)
    assert (late.of, late.unit, late.kind) == ("MainThread", "ms", "interval")
    assert took_ms / 2 < max(late.values) < took_ms + 100  # a busy machine delays the question, too


def test_a_loop_that_runs_is_not_late(config: ProfileConfig) -> None:
    asyncio.run(turns(config))
    values = sorted(counter(config, EVENT_LOOP).values)
    assert values[len(values) // 2] < 50


def test_a_loop_that_has_stopped_is_not_late(config: ProfileConfig) -> None:
    async def work() -> None:
        for _ in range(5):
            with span("turn"):
                await asyncio.sleep(0.05)

    with capture(1, config=config):
        asyncio.run(work())
        time.sleep(0.5)  # it has no loop: nobody waits
    assert max(counter(config, EVENT_LOOP).values) < 400


def test_without_spans_on_a_loop_nothing_is_said_of_loops(config: ProfileConfig) -> None:
    with capture(1, config=config), span("update"):
        burn(0.1)
    names = {item.name for item in load_step(f"{config.save_path}/step_000001").counters}
    assert EVENT_LOOP not in names
    assert {"process CPU", "process memory", "open files", "garbage collector"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 3])
def test_a_call_that_blocks_its_loop_is_named_if_others_wait_for_the_loop(
    config: ProfileConfig, others: int
) -> None:
    async def waits() -> None:
        with span("turn"):
            for _ in range(50):
                await asyncio.sleep(0.01)

    async def work() -> None:
        waiting = [asyncio.create_task(waits()) for _ in range(others)]
        with span("warm-up"):
            await asyncio.sleep(0.1)
        with span("add", role="env"):
            time.sleep(0.3)  # noqa: ASYNC251  # as above
        await asyncio.gather(*waiting)

    with capture(1, config=config):
        asyncio.run(work())
    late = list(late_loops(load_step(f"{config.save_path}/step_000001")))
    assert [loop.blocker for loop in late] == ([("env", "add")] if others else [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_the_running_task_tells_the_call_that_blocks_a_loop_and_its_line(
    config: ProfileConfig, kind: str
) -> None:
    """Other calls end before it, because their timers ran out meanwhile, and it goes on after its block."""

    async def waits() -> None:
        for _ in range(5):
            with span("generate", role="rollout"):
                await asyncio.sleep(0.1)

    async def adds() -> None:
        with span("add", role="env"):
            await asyncio.sleep(0.15)
            time.sleep(0.5)  # noqa: ASYNC251  # the line
            await asyncio.sleep(0.05)

    async def work() -> None:
        await asyncio.gather(*(waits() for _ in range(4)), wrapped())

    async def wrapped() -> None:  # as Ray wraps methods of actors
        await adds()

    with capture(1, config=config):
        (asyncio if kind == "asyncio" else pytest.importorskip("uvloop")).run(work())
    (late,) = late_loops(load_step(f"{config.save_path}/step_000001"))
    assert late.blocker == ("env", "add")
    lines = Path(__file__).read_text().splitlines()
    file, _, number = late.line.partition(":")
    assert (file, lines[int(number) - 1].partition("# ")[2]) == (
        Path(__file__).name,
        "noqa: ASYNC251  # the line",
    )


@pytest.mark.slow
def test_each_place_that_blocks_a_loop_is_told_with_the_sum_of_its_blocks(config: ProfileConfig) -> None:
    """The first block of `search` is followed by that of the reward before the loop runs again."""
    took_s = dict.fromkeys([("env", "tool search"), ("reward", "score")], 0.0)

    def blocks(place: tuple[str, str], seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        took_s[place] += time.monotonic() - began

    async def searches() -> None:
        for _ in range(2):
            with span("tool", role="env", attrs={"name": "search"}):
                await asyncio.sleep(0.2)
                blocks(("env", "tool search"), 0.4)  # the tool
            await asyncio.sleep(0.3)

    async def scores() -> None:
        with span("score", role="reward"):
            await asyncio.sleep(0.2)
            blocks(("reward", "score"), 0.5)  # the reward

    async def waits() -> None:
        with span("tool", role="env", attrs={"name": "clock"}):
            await asyncio.sleep(2)

    async def work() -> None:
        await asyncio.gather(searches(), scores(), waits())

    with capture(1, config=config):
        asyncio.run(work())
    late = list(late_loops(load_step(f"{config.save_path}/step_000001")))
    lines = Path(__file__).read_text().splitlines()
    assert {(loop.blocker, lines[int(loop.line.split(":")[1]) - 1].partition("# ")[2]) for loop in late} == {
        (("env", "tool search"), "the tool"),
        (("reward", "score"), "the reward"),
    }
    assert {loop.blocker: len(loop.blocks) for loop in late} == {
        ("env", "tool search"): 2,
        ("reward", "score"): 1,
    }
    for loop in late:
        assert loop.blocker is not None
        assert loop.late_ns / 1e9 == pytest.approx(took_s[loop.blocker], abs=0.2)
