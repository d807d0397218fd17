"""Recordings become files: whole or not at all, never in the way."""

from __future__ import annotations

import gzip
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from packages.core.tests.runs import handling
from stepscope._recording.process import exports
from stepscope._recording.process.exports import Exporter, ExportResult
from stepscope.backends import PendingArtifact
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.backend_conformance import in_child

BODY = b'{"traceEvents": []}' * 1000


def writes(content: bytes = BODY) -> Callable[[Path], None]:
    """Return the `write` of a recording whose file holds `content`."""

    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


class Submission:
    """One export, seen from outside."""

    def __init__(
        self,
        exporter: Exporter,
        target: Path,
        *,
        write: Callable[[Path], None] | None = None,
        compress: bool = True,
        deferred: bool = False,
        step: int = 2,
    ) -> None:
        self.target = target
        self.step = step
        self.discarded = 0
        self.results: list[ExportResult] = []
        pending = PendingArtifact(
            kind="fake_trace",
            suffix=".json",
            write=write or writes(),
            compress=compress,
            discard=self._discard,
        )
        exporter.submit(
            pending, target=target, describe=self._describe, on_done=self.results.append, deferred=deferred
        )

    @property
    def error(self) -> str:
        [result] = self.results
        assert result.artifact is None
        return str(result.error)

    @property
    def path(self) -> Path:
        [result] = self.results
        assert result.error is None
        assert result.artifact is not None
        return Path(result.artifact.path)

    def _discard(self) -> None:
        self.discarded += 1

    def _describe(self, size_bytes: int, path: Path) -> Sidecar:
        artifact = Artifact(
            path=str(path), kind="fake_trace", tool="fake", role="actor", host="h", size_bytes=size_bytes
        )
        return Sidecar(
            step=self.step, run_id="run1", artifact=artifact, process=None, opened=None, closed=None
        )


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    assert exporter.drain(30) == []


@pytest.fixture
def blocked(exporter: Exporter, tmp_path: Path) -> Iterator[threading.Event]:
    """Keep the exporter busy until this event is set."""
    begun, release = threading.Event(), threading.Event()

    def write(path: Path) -> None:
        begun.set()
        release.wait()
        path.write_bytes(BODY)

    Submission(exporter, tmp_path / "blocker" / "blocker.json", write=write)
    begun.wait()
    yield release
    release.set()


def test_an_export_is_a_compressed_file_with_its_sidecar(exporter: Exporter, tmp_path: Path) -> None:
    done = Submission(exporter, tmp_path / "traces" / "actor" / "update.json")
    assert exporter.drain(30) == []
    assert done.path == tmp_path / "traces" / "actor" / "update.json.gz"
    assert gzip.decompress(done.path.read_bytes()) == BODY
    sidecar = msgspec.json.decode(sidecar_of(done.path).read_bytes(), type=Sidecar)
    assert sidecar.artifact.size_bytes == done.path.stat().st_size
    assert done.results[0].cost_ns > 0


def test_nobody_else_can_read_a_trace(exporter: Exporter, tmp_path: Path) -> None:
    done = (
        Submission(exporter, tmp_path / "a.json"),
        Submission(exporter, tmp_path / "b.json", compress=False),
    )
    exporter.drain(30)
    for trace in done:
        for path in (trace.path, sidecar_of(trace.path)):
            assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_that_is_taken_is_not_used_again(exporter: Exporter, tmp_path: Path) -> None:
    done = [Submission(exporter, tmp_path / "a.json") for _ in range(3)]
    exporter.drain(30)
    assert [trace.path.name for trace in done] == ["a.json.gz", "a-2.json.gz", "a-3.json.gz"]


def test_a_sidecar_is_never_there_before_its_file(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        assert self.stat().st_size > 0
        order.append(target.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    Submission(exporter, tmp_path / "a.json")
    exporter.drain(30)
    assert order == ["a.json.gz", "a.json.gz.meta.json"]


def test_a_deferred_export_waits_until_it_is_drained(exporter: Exporter, tmp_path: Path) -> None:
    deferred = Submission(exporter, tmp_path / "later.json", deferred=True)
    at_once = Submission(exporter, tmp_path / "now.json")
    finished = threading.Event()
    exporter.submit(
        PendingArtifact(kind="k", suffix=".json", write=writes(), compress=False),
        target=tmp_path / "last.json",
        describe=at_once._describe,
        on_done=lambda _: finished.set(),
        deferred=False,
    )
    assert finished.wait(30)
    assert at_once.results
    assert not deferred.results
    assert exporter.drain(30) == []
    assert deferred.path.is_file()


def test_drain_names_what_is_unfinished_at_the_deadline(
    exporter: Exporter, blocked: threading.Event, tmp_path: Path
) -> None:
    Submission(exporter, tmp_path / "waiting.json", deferred=True)
    assert exporter.drain(0.01) == ["blocker.json", "waiting.json"]
    blocked.set()
    assert exporter.drain(30) == []


def test_bytes_are_counted_by_step(exporter: Exporter, tmp_path: Path) -> None:
    two = [Submission(exporter, tmp_path / f"{number}.json", step=2) for number in range(2)]
    Submission(exporter, tmp_path / "three.json", step=3, compress=False)
    exporter.drain(30)
    assert exporter.bytes_written(2) == sum(trace.path.stat().st_size for trace in two)
    assert exporter.bytes_written(3) == len(BODY)
    assert exporter.bytes_written(4) == 0


class TestFailures:
    def test_a_recording_that_cannot_be_written_is_a_result(self, exporter: Exporter, tmp_path: Path) -> None:
        def fail(path: Path) -> None:
            path.write_bytes(BODY)
            raise RuntimeError("the profiler lost it")

        done = Submission(exporter, tmp_path / "a.json", write=fail)
        after = Submission(exporter, tmp_path / "b.json")
        exporter.drain(30)
        assert done.error.startswith("RuntimeError: ")
        assert done.discarded == 1
        assert after.path.is_file()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json.gz", "b.json.gz.meta.json"]

    @pytest.mark.parametrize("folder", ["file", "/proc/self/task"])  # where not even root may write
    def test_a_folder_that_takes_no_file_is_a_result(
        self, exporter: Exporter, tmp_path: Path, folder: str
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        done = Submission(exporter, tmp_path / folder / "a.json")
        exporter.drain(30)
        assert "Error" in done.error
        assert str(tmp_path / folder) in done.error
        assert done.discarded == 1

    def test_a_disk_that_fills_while_compressing_leaves_nothing(
        self, exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("shutil.copyfileobj", full)
        done = Submission(exporter, tmp_path / "a.json")
        exporter.drain(30)
        assert "No space left" in done.error
        assert not list(tmp_path.iterdir())

    def test_a_result_that_cannot_be_reported_stops_nothing(
        self, exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STEPSCOPE_RAISE", "0")

        def broken(_: ExportResult) -> None:
            raise RuntimeError("nobody listens")

        first = Submission(exporter, tmp_path / "other" / "a.json")
        pending = PendingArtifact(kind="k", suffix=".json", write=writes(), compress=False)
        exporter.submit(
            pending, target=tmp_path / "a.json", describe=first._describe, on_done=broken, deferred=False
        )
        last = Submission(exporter, tmp_path / "b.json")
        assert exporter.drain(30) == []
        assert last.path.is_file()


class TestProcess:
    def test_a_forked_child_has_an_empty_queue(self, tmp_path: Path) -> None:
        parent = exports.exporter()
        submission = Submission(parent, tmp_path / "parent.json", deferred=True)

        def child_exports() -> bool:
            own = exports.exporter()
            done = Submission(own, tmp_path / "child.json")
            return own is not parent and own.drain(20) == [] and done.path.is_file()

        assert in_child(child_exports)
        assert not submission.results
        assert parent.drain(30) == []
        assert submission.path.is_file()

    def test_where_no_thread_can_be_started_drain_does_the_work(
        self, exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python 3.12 starts none while it exits."""

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        done = [Submission(exporter, tmp_path / f"{number}.json", deferred=True) for number in range(2)]
        assert exporter.drain(30) == []
        assert all(trace.path.is_file() for trace in done)

    def test_a_signal_handler_may_drain_in_the_middle_of_a_submit(
        self, exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drained: list[list[str]] = []
        start_thread = exporter._queue.start

        def interrupted() -> None:
            start_thread()
            signal.raise_signal(signal.SIGUSR1)

        monkeypatch.setattr(exporter._queue, "start", interrupted)
        with handling(signal.SIGUSR1, lambda *_: drained.append(exporter.drain(30))):
            done = Submission(exporter, tmp_path / "a.json")
        assert drained == [[]]
        assert done.path.is_file()

    def test_compression_leaves_the_gil_to_others(self) -> None:
        """Nobody is made to give the GIL up here, so the main thread runs early only if igzip releases it."""
        from isal import isal_zlib

        block = os.urandom(1 << 20) * 64
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)
        try:
            assert any(self.runs_beside(lambda: isal_zlib.compress(block, 1)) for _ in range(5))
            assert not self.runs_beside(lambda: sum(block[: 1 << 22]))  # as a check of the check
        finally:
            sys.setswitchinterval(interval)

    def runs_beside(self, work: Callable[[], object]) -> bool:
        """Return whether the main thread came to run while another one was in `work`."""
        begun, ended = threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            work()
            ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        beside = not ended.is_set()
        thread.join()
        return beside


def test_a_recording_may_be_a_folder_and_its_size_is_that_of_all_in_it(
    exporter: Exporter, tmp_path: Path
) -> None:
    def write(path: Path) -> None:
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "data").write_bytes(BODY)

    done = Submission(exporter, tmp_path / "traces" / "capture.json", write=write, compress=False)
    exporter.drain(10)
    artifact = done.results[0].artifact
    assert artifact is not None
    assert artifact.size_bytes == len(BODY)
    assert (done.target / "inner" / "data").read_bytes() == BODY
    assert sidecar_of(done.target).is_file()
    assert done.target.stat().st_mode & 0o777 == 0o700
