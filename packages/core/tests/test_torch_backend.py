"""The torch backend, with real torch, where nothing can crash this process."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope import capture
from stepscope.backends import PendingArtifact, SpanInfo
from stepscope.backends.torch.backend import TorchBackend
from stepscope.backends.window_thread import MAIN
from stepscope.config import BudgetConfig, ProfileConfig, ScheduleConfig, TorchConfig
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.testing.backend_conformance import a_window, discard, in_thread, written

Event = dict[str, Any]
UPDATE = SpanInfo(stage="update", role="actor", span=1, is_async=False)


@pytest.fixture
def make() -> Iterator[Callable[..., TorchBackend]]:
    """`make(**torch options)`: a backend, stopped when the test ends."""
    made: list[TorchBackend] = []

    def make(budget: BudgetConfig | None = None, **options: Any) -> TorchBackend:
        config = ProfileConfig(torch=TorchConfig(**options), budget=budget or BudgetConfig())
        made.append(TorchBackend(config))
        return made[-1]

    yield make
    for backend in made:
        discard(backend.stop())


def work(name: str = "work") -> None:
    with torch.profiler.record_function(name):
        torch.ones(16, 16) @ torch.ones(16, 16)


def occupy_main_thread_while(thread: threading.Thread) -> None:
    """Run it while the main thread answers nobody, as if it were in C code."""

    def run() -> None:
        thread.start()
        thread.join()

    MAIN.submit(run)


def trace(pending: PendingArtifact, folder: Path) -> dict[str, Any]:
    [path] = written([pending], folder)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def names(pending: PendingArtifact, folder: Path) -> Counter[str]:
    return Counter(event["name"] for event in trace(pending, folder)["traceEvents"])


def test_a_trace_says_whose_it_is(make: Callable[..., TorchBackend], tmp_path: Path) -> None:
    backend = make()
    backend.start(a_window(step=7, stage="update", index=3))
    [pending] = backend.stop()
    content = trace(pending, tmp_path)
    assert content["stepscope"]["step"] == 7
    assert content["stepscope"]["role"] == "actor"
    assert content["stepscope"]["rank"] == 0
    assert content["stepscope"]["stage"] == "update"
    assert content["trace_id"] == "step_7_actor_rank0_update_3_0"


def test_a_sync_span_is_a_range_of_the_trace_and_an_async_one_is_not(
    make: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    with backend.range(UPDATE):
        work()
    with backend.range(SpanInfo(stage="generate", role="rollout", span=2, is_async=True)):
        work()
    counts = names(backend.stop()[0], tmp_path)
    assert counts["actor.update"] == 1
    assert counts["rollout.generate"] == 0
    assert counts["work"] == 2


def test_the_main_thread_is_recorded_alone_unless_all_threads_are_asked_for(
    make: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    for all_threads in (False, True):
        backend = make(all_threads=all_threads)
        backend.start(a_window())
        work("here")
        in_thread(lambda: work("there"))
        counts = names(backend.stop()[0], tmp_path / str(all_threads))
        assert counts["here"] == 1
        assert counts["there"] == int(all_threads)


def test_a_window_of_a_pool_thread_records_every_thread_and_outlives_it(
    make: Callable[..., TorchBackend], tmp_path: Path
) -> None:
    backend = make()

    def start() -> None:
        backend.start(a_window())
        work("pool")

    in_thread(start)
    work("main")
    counts = names(in_thread(backend.stop)[0], tmp_path)
    assert counts["pool"] == counts["main"] == 1


def test_what_this_machine_cannot_record_is_ignored_with_the_reason(
    make: Callable[..., TorchBackend],
) -> None:
    backend = make(activities=["cpu", "mtia"], profile_memory=True, all_threads=True)
    backend.start(a_window())
    [pending] = backend.stop()
    assert "records cpu" in pending.ignored["torch.activities.mtia"]
    assert "all threads" in pending.ignored["torch.profile_memory"]
    assert pending.options["activities"] == "cpu"
    assert pending.versions["torch"] == torch.__version__


def test_no_activity_of_this_machine_is_an_error_with_the_fix(make: Callable[..., TorchBackend]) -> None:
    with pytest.raises(BackendError, match=r"Fix: torch.activities: \["):
        make(activities=["mtia"]).check()


def test_heavy_options_reach_the_trace(make: Callable[..., TorchBackend], tmp_path: Path) -> None:
    backend = make(record_shapes=True, profile_memory=True, with_stack=True, with_flops=True)
    backend.start(a_window())
    work()
    events = trace(backend.stop()[0], tmp_path)["traceEvents"]
    assert any(event["name"] == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)
    product = next(event for event in events if event["name"] == "aten::mm")
    assert product["args"]["Input Dims"] == [[16, 16], [16, 16]]


def test_a_trace_without_python_events_holds_the_same_events(
    make: Callable[..., TorchBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace_only`, which makes stop() faster, changes nothing in the file."""
    from stepscope.backends.torch import window as torch_options

    if not torch_options._switches(all_threads=False, with_stack=False):
        pytest.skip(f"torch {torch.__version__} has no trace_only")
    counts: list[Counter[str]] = []
    recorded: list[PendingArtifact] = []
    for switches in ({"trace_only": True}, {}):
        monkeypatch.setattr(torch_options, "_switches", lambda switches=switches, **_: switches)
        backend = make(profile_memory=True, record_shapes=True)
        for _ in range(2):  # the first time torch sets up autograd
            backend.start(a_window())
            torch.autograd.backward(torch.ones(4, 4, requires_grad=True).sum())
            recorded = backend.stop()
        counts.append(names(recorded[0], tmp_path / str(len(counts))))
    assert counts[0] == counts[1]


class TestSchedule:
    def test_every_cycle_becomes_an_artifact(self, make: Callable[..., TorchBackend], tmp_path: Path) -> None:
        backend = make(schedule=ScheduleConfig(skip_first=1, wait=1, warmup=1, active=2, repeat=2))
        recorded = self.run(backend, 12, tmp_path)
        assert recorded == [{"3", "4"}, {"7", "8"}]

    def test_a_cycle_that_the_window_ends_in_is_kept_and_marked(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        """Frameworks that save in a callback of the last mini-batch lose it."""
        backend = make(schedule=ScheduleConfig(wait=1, warmup=1, active=10))
        backend.start(a_window())
        for number in range(5):
            work(str(number))
            backend.advance()
        [pending] = backend.stop()
        assert pending.truncated is not None
        assert "3 of 10 active" in pending.truncated
        assert {"2", "3", "4"} <= set(names(pending, tmp_path))

    def test_a_schedule_that_is_never_active_says_so(self, make: Callable[..., TorchBackend]) -> None:
        for warmup in (0, 5):
            backend = make(schedule=ScheduleConfig(wait=5 - warmup, warmup=warmup, active=1))
            backend.start(a_window())
            backend.advance()
            with pytest.raises(BackendError, match=r"mini-batch 5 .* 1 times"):
                backend.stop()
            assert backend.stop() == []

    def test_cycles_that_follow_each_other_at_once_are_kept_apart(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        backend = make(schedule=ScheduleConfig(active=1, repeat=3))
        assert self.run(backend, 5, tmp_path) == [{"0"}, {"1"}, {"2"}]

    def test_it_walks_on_all_threads_too(self, make: Callable[..., TorchBackend], tmp_path: Path) -> None:
        backend = make(schedule=ScheduleConfig(wait=1, warmup=1, active=1, repeat=2), all_threads=True)
        assert self.run(backend, 6, tmp_path) == [{"2"}, {"5"}]

    def test_a_user_profiler_between_two_cycles_costs_the_cycles_that_follow(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        backend = make(schedule=ScheduleConfig(wait=1, active=1, repeat=2))
        backend.start(a_window())
        backend.advance()
        work("ours")
        backend.advance()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            work("theirs")
            backend.advance()
        [pending] = backend.stop()
        assert "started torch.profiler" in str(pending.truncated)
        assert names(pending, tmp_path)["ours"] == 1
        theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
        assert "theirs" in (tmp_path / "theirs.json").read_text()

    def run(self, backend: TorchBackend, mini_batches: int, folder: Path) -> list[set[str]]:
        """Return the mini-batches that each artifact holds."""
        backend.start(a_window())
        for number in range(mini_batches):
            work(str(number))
            backend.advance()
        pending = backend.stop()
        assert [one.truncated for one in pending] == [None] * len(pending)
        return [{n for n in names(one, folder / str(i)) if n.isdigit()} for i, one in enumerate(pending)]


class TestWriting:
    def test_a_missing_folder_is_an_error(self, make: Callable[..., TorchBackend], tmp_path: Path) -> None:
        [pending] = self.recorded(make)
        with pytest.raises(BackendError, match="wrote no trace"):
            pending.write(tmp_path / "absent" / "trace.json")

    def test_an_artifact_is_written_once(self, make: Callable[..., TorchBackend], tmp_path: Path) -> None:
        [pending] = self.recorded(make)
        pending.write(tmp_path / "trace.json")
        with pytest.raises(BackendError, match="discarded already"):
            pending.write(tmp_path / "again.json")

    def test_writing_frees_the_recording_without_the_garbage_collector(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        import gc
        import weakref

        backend = make()
        gc.collect()
        gc.disable()
        try:
            backend.start(a_window())
            window = backend._held.window
            assert window is not None
            assert window._profile is not None
            freed = weakref.ref(window._profile)
            del window
            [pending] = backend.stop()
            pending.write(tmp_path / "trace.json")
            assert freed() is None
        finally:
            gc.enable()

    def recorded(self, make: Callable[..., TorchBackend]) -> list[PendingArtifact]:
        backend = make()
        backend.start(a_window())
        work()
        return backend.stop()


class TestOtherProfilers:
    CPU = (torch.profiler.ProfilerActivity.CPU,)

    @pytest.mark.parametrize("all_threads", [False, True])
    def test_ours_does_not_start_beside_one_that_runs(
        self, make: Callable[..., TorchBackend], tmp_path: Path, all_threads: bool
    ) -> None:
        backend = make(all_threads=all_threads)
        with torch.profiler.profile(activities=self.CPU) as theirs:
            work("theirs")
            with pytest.raises(ProfilerBusyError, match="not stepscope's"):
                backend.start(a_window())
            assert backend.stop() == []
            work("theirs")
        self.assert_whole(theirs, tmp_path, 2)

    def test_ours_does_not_start_beside_one_of_another_thread(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        backend = make()
        started, finish = threading.Event(), threading.Event()
        theirs = torch.profiler.profile(activities=self.CPU)

        def profile() -> None:
            with theirs:
                started.set()
                work("theirs")
                finish.wait()

        thread = threading.Thread(target=profile)
        thread.start()
        started.wait()
        try:
            with pytest.raises(ProfilerBusyError, match="not stepscope's"):
                backend.start(a_window())
        finally:
            finish.set()
            thread.join()
        self.assert_whole(theirs, tmp_path, 1)

    def test_ours_does_not_start_beside_one_that_warms_up(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        """torch shows it to nobody, and crashes when it stops after ours."""
        backend = make()
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
        with torch.profiler.profile(activities=self.CPU, schedule=schedule) as theirs:
            with pytest.raises(ProfilerBusyError, match="warming up"):
                backend.start(a_window())
            theirs.step()
            work("theirs")
        self.assert_whole(theirs, tmp_path, 1)

    def test_the_autograd_profiler_counts(self, make: Callable[..., TorchBackend]) -> None:
        with torch.autograd.profiler.profile(), pytest.raises(ProfilerBusyError):
            make().start(a_window())

    def assert_whole(self, theirs: Any, folder: Path, count: int) -> None:
        path = folder / "theirs.json"
        theirs.export_chrome_trace(str(path))
        assert path.read_text().count('"name": "theirs"') == count


class TestForeignThreads:
    def test_a_stop_while_the_main_thread_is_in_c_code_is_completed_later(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        backend = make()
        backend.start(a_window())
        work("before")
        pending: list[PendingArtifact] = []
        thread = threading.Thread(target=lambda: pending.extend(backend.stop()), name="watchdog")
        occupy_main_thread_while(thread)
        [late] = pending
        assert "thread watchdog" in str(late.note)
        assert late.truncated is None
        assert names(late, tmp_path)["before"] == 1
        assert callable(late.lacking)
        assert late.lacking() is None

    def test_a_capture_that_another_thread_closes_has_all_of_the_trace(self, tmp_path: Path) -> None:
        config = ProfileConfig(save_path=tmp_path, steps=[0], torch={"activities": ["cpu"]})
        opened = capture(0, config=config).open()
        work("before")
        thread = threading.Thread(target=opened.close)
        occupy_main_thread_while(thread)
        manifest = opened.result.wait(60)
        assert manifest is not None
        (trace,) = [item for item in manifest.processes[0].expected if item.kind == "trace"]
        assert (trace.state, trace.reason) == ("ok", None)
        assert "when MainThread came" in trace.notes[0]

    def test_a_main_thread_that_never_comes_back_is_an_error_with_both_names(
        self, make: Callable[..., TorchBackend], tmp_path: Path
    ) -> None:
        backend = make(budget=BudgetConfig(export_seconds=0.1))
        backend.start(a_window())
        errors: list[str] = []

        def stop_and_write() -> None:
            try:
                backend.stop()[0].write(tmp_path / "trace.json")
            except BackendError as error:
                errors.append(str(error))

        thread = threading.Thread(target=stop_and_write, name="watchdog")
        occupy_main_thread_while(thread)
        assert "from thread watchdog" in errors[0]
        assert "belongs to MainThread" in errors[0]

    def test_ranges_are_null_on_a_thread_that_is_not_recorded(
        self, make: Callable[..., TorchBackend]
    ) -> None:
        backend = make()
        assert backend.range(UPDATE) is backend.range(UPDATE)
        backend.start(a_window())
        assert backend.range(UPDATE) is not backend.range(UPDATE)
        assert in_thread(lambda: [backend.range(UPDATE) is backend.range(UPDATE)]) == [True]


def test_a_device_that_does_not_synchronize_is_stopped_all_the_same(
    make: Callable[..., TorchBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    backend.start(a_window())
    work()
    window = backend._held.window
    assert window is not None
    assert window._profile is not None
    assert window._profile.profiler is not None

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    window._profile.profiler.use_device = "cpu"  # it has a synchronize() to break, here
    monkeypatch.setattr(torch.cpu, "synchronize", broken)
    [pending] = backend.stop()
    assert "illegal memory access" in str(pending.truncated)
    assert names(pending, tmp_path)["work"] == 1


def test_a_session_ended_from_outside_is_reported_and_not_stopped_again(
    make: Callable[..., TorchBackend],
) -> None:
    backend = make()
    backend.start(a_window())
    torch._C._autograd._disable_profiler()
    with pytest.raises(BackendError, match="from outside stepscope"):
        backend.stop()
    torch.autograd.profiler._set_is_profiler_enabled(False)
    backend.start(a_window())
    discard(backend.stop())
