"""The protocol `Backend`, as tests. Subclass `BackendConformance` and define the fixture `make_backend`:

    class TestMyBackend(BackendConformance):
        @pytest.fixture def make_backend(self):
            return lambda: MyBackend(ProfileConfig())

        def stages_in(self, path):
            return set(re.findall(r"actor\\.(\\w+)", path.read_text()))

Override the methods under "Optional controls" if the profiler allows it. A test is skipped if it needs a
control that is not overridden; the message names the control. A faulty backend may crash the test process.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar

import pytest

from stepscope.backends import Backend, PendingArtifact, SpanInfo, Window
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.files.sidecar import ProcessInfo

T = TypeVar("T")
MakeBackend: TypeAlias = Callable[[], Backend]


class BackendConformance:
    """Tests of the protocol `Backend`. Every test leaves the backend idle."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Return a function that returns a new, idle backend at each call."""
        raise NotImplementedError("override the fixture `make_backend`")

    # Optional controls.

    def work(self) -> None:
        """Run some code that the profiler can record."""

    def stages_in(self, path: Path) -> set[str] | None:
        """Return the stages of the markers in a written trace, or None if the profiler has no markers."""
        return None

    def fail_halfway(self, backend: Backend) -> Callable[[], None]:
        """Make the next start fail after it has begun. Return a function that undoes this."""
        _cannot("fail_halfway")

    # The contract.

    def test_it_has_a_name_and_its_check_passes(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        backend.check()
        assert backend.name

    def test_prepare_any_number_of_times(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        backend.prepare()
        backend.prepare()
        assert backend.stop() == []

    def test_stop_without_start_returns_nothing(self, make_backend: MakeBackend) -> None:
        assert make_backend().stop() == []

    def test_a_window_becomes_a_complete_file(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        for path in self._record(backend, a_window(), tmp_path):
            assert any(file.stat().st_size > 0 for file in (path, *path.rglob("*")) if file.is_file())
            assert self.stages_in(path) in (None, {"update"})

    def test_a_second_stop_returns_nothing(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        backend.start(a_window())
        self.work()
        pending = backend.stop()
        assert backend.stop() == []
        assert written(pending, tmp_path)

    def test_a_second_start_is_refused_and_the_window_goes_on(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend = make_backend()
        backend.start(a_window())
        with pytest.raises(ProfilerBusyError):
            backend.start(a_window(step=3))
        self._mark(backend, "afterwards")
        paths = written(backend.stop(), tmp_path)
        assert any(self.stages_in(path) in (None, {"afterwards"}) for path in paths)

    def test_another_backend_of_the_process_is_refused(self, make_backend: MakeBackend) -> None:
        backend, other = make_backend(), make_backend()
        backend.start(a_window())
        try:
            with pytest.raises(ProfilerBusyError, match="2"):
                other.start(a_window(step=3))
            assert other.stop() == []
        finally:
            discard(backend.stop())

    def test_windows_never_mix(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        kept = []
        for step in (2, 3, 4):
            backend.start(a_window(step=step))
            self._mark(backend, f"in_step_{step}")
            kept.append((step, backend.stop()))
        for step, pending in reversed(kept):
            for path in written(pending, tmp_path / str(step)):
                assert self.stages_in(path) in (None, {f"in_step_{step}"})

    def test_an_artifact_is_written_by_another_thread_while_the_next_window_records(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend = make_backend()
        backend.start(a_window(step=2))
        self._mark(backend, "first")
        pending = backend.stop()
        backend.start(a_window(step=3))
        paths = in_thread(lambda: written(pending, tmp_path / "2"))
        self._mark(backend, "second")
        second = written(backend.stop(), tmp_path / "3")
        assert all(self.stages_in(path) in (None, {"first"}) for path in paths)
        assert all(self.stages_in(path) in (None, {"second"}) for path in second)

    def test_a_stop_from_another_thread_loses_nothing(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend = make_backend()
        backend.start(a_window())
        self._mark(backend, "update")
        pending = in_thread(backend.stop)
        assert backend.stop() == []
        assert all(self.stages_in(path) in (None, {"update"}) for path in written(pending, tmp_path))

    def test_a_window_of_another_thread(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()

        def whole_window() -> list[PendingArtifact]:
            backend.start(a_window())
            self._mark(backend, "update")
            return backend.stop()

        paths = written(in_thread(whole_window), tmp_path)
        assert all(self.stages_in(path) in (None, {"update"}) for path in paths)

    def test_a_start_that_fails_halfway_leaves_nothing(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend = make_backend()
        repair = self.fail_halfway(backend)
        try:
            with pytest.raises(BackendError):
                backend.start(a_window())
        finally:
            repair()
        assert backend.stop() == []
        assert self._record(make_backend(), a_window(step=3), tmp_path)

    def test_advance_does_nothing_when_idle(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        backend.advance()
        assert backend.stop() == []
        backend.advance()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_range_is_transparent_at_any_time(self, make_backend: MakeBackend, is_async: bool) -> None:
        backend = make_backend()
        info = SpanInfo(stage="update", role="actor", span=1, is_async=is_async)
        for step in (None, 2, None):
            if step is not None:
                backend.start(a_window(step=step))
            with pytest.raises(KeyError, match="the user's own"), backend.range(info):
                raise KeyError("the user's own")
            in_thread(lambda: backend.range(info).__enter__())
            discard(backend.stop())

    def test_a_range_that_the_window_ends_in_is_closed_in_peace(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        backend.start(a_window())
        with backend.range(SpanInfo(stage="update", role="actor", span=1, is_async=False)):
            discard(backend.stop())

    def test_a_range_may_end_in_a_later_window(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        info = SpanInfo(stage="update", role="actor", span=1, is_async=False)
        for step in range(3):
            backend.start(a_window(step=step))
            with ExitStack() as ranges:
                for _ in range(100):
                    ranges.enter_context(backend.range(info))
                discard(backend.stop())
                backend.start(a_window(step=step + 1))
            discard(backend.stop())
        assert self._record(backend, a_window(step=9), tmp_path)

    def test_a_discarded_artifact_is_forgotten(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        backend.start(a_window())
        self.work()
        pending = backend.stop()
        discard(pending)
        discard(pending)
        assert self._record(backend, a_window(step=3), tmp_path)

    def test_a_fork_leaves_the_window_to_the_parent(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        backend = make_backend()
        backend.start(a_window())
        self._mark(backend, "update")

        def child_does_no_harm() -> bool:
            self.work()
            backend.advance()
            return backend.stop() == []

        assert in_child(child_does_no_harm)
        paths = written(backend.stop(), tmp_path)
        assert all(self.stages_in(path) in (None, {"update"}) for path in paths)

    def test_many_short_windows(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        for index in range(20):
            backend.start(a_window(stage="update", index=index))
            discard(backend.stop())

    # Helpers of the tests.

    def _record(self, backend: Backend, window: Window, folder: Path) -> list[Path]:
        backend.start(window)
        self._mark(backend, "update")
        return written(backend.stop(), folder)

    def _mark(self, backend: Backend, stage: str) -> None:
        with backend.range(SpanInfo(stage=stage, role="actor", span=1, is_async=False)):
            self.work()


def a_window(step: int = 2, stage: str | None = None, index: int = 0) -> Window:
    """Return a window of rank 0 of the actor."""
    process = ProcessInfo(role="actor", rank=0, world_size=2, host="host-a", pid=os.getpid())
    return Window(step=step, process=process, stage=stage, index=index)


def written(pending: list[PendingArtifact], folder: Path) -> list[Path]:
    """Write the artifacts and return their files. There must be at least one artifact."""
    assert pending, "the window has no artifact"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, artifact in enumerate(pending):
        path = folder / f"{number}{artifact.suffix}"
        artifact.write(path)
        assert artifact.kind
        assert path.is_file() or (path.is_dir() and not artifact.compress)
        paths.append(path)
    left = "write() leaves one file or folder, under the name it was given"
    assert sorted(folder.iterdir()) == sorted(paths), left
    return paths


def discard(pending: list[PendingArtifact]) -> None:
    for artifact in pending:
        artifact.discard()


def in_thread(call: Callable[[], T]) -> T:
    """Return the result of `call` on a separate thread."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="test-thread")
    thread.start()
    while thread.is_alive():
        thread.join(0.01)  # short, because a join keeps the main thread in C code
    assert results, "the thread raised"
    return results[0]


def in_child(passes: Callable[[], bool], timeout_s: float = 30) -> bool:
    """Return whether `passes` returns True in a forked child. The child exits without clean-up."""
    with warnings.catch_warnings():
        # Python warns of a fork with threads, and the tests fork with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(timeout_s))  # a child that hangs is killed
        status = 1
        try:
            status = 0 if passes() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _cannot(method: str) -> NoReturn:
    pytest.skip(f"this backend has no `{method}`: override it in the subclass of BackendConformance")
