"""The contract of a backend, for the nsys backend: `real/test_nsys.py` starts pytest with it under nsys."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from packages.core.tests.real.test_nsys import CONFIG, ranges
from stepscope.backends import nsys
from stepscope.backends.nsys import NsysBackend
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.errors import ProfilerBusyError
from stepscope.testing.backend_conformance import BackendConformance, MakeBackend, a_window, discard, written


class TestNsysBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda: NsysBackend(CONFIG)

    def work(self) -> None:
        time.sleep(0.1)

    def stages_in(self, path: Path) -> set[str]:
        return {name.removeprefix("actor.") for name in ranges(path)}

    def test_an_interrupted_stop_leaves_the_window_to_a_second_one(
        self, make_backend: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        for where in ("_synchronize", "_await_output"):
            backend = make_backend()
            backend.start(a_window())
            self._mark(backend, "update")
            with monkeypatch.context() as interrupting:
                interrupting.setattr(nsys, where, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    backend.stop()
            (path,) = written(backend.stop(), tmp_path / where)
            assert self.stages_in(path) == {"update"}

    def test_an_interrupted_start_is_stopped(
        self, make_backend: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        backend = make_backend()
        with monkeypatch.context() as interrupting:
            interrupting.setattr(nsys, "_finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                backend.start(a_window())
        discard(backend.stop())
        assert self._record(make_backend(), a_window(), tmp_path)

    def test_nothing_is_left_in_the_temporary_folder(
        self, make_backend: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        backend = make_backend()
        backend.start(a_window())
        discard(backend.stop())
        self._record(backend, a_window(step=3), tmp_path / "written")
        assert [path.name for path in tmp_path.iterdir()] == ["written"]

    def test_a_refused_start_leaves_the_report_of_the_window_before(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend = make_backend()
        backend.start(a_window())
        self._mark(backend, "update")
        pending = backend.stop()
        PROCESS_LOCK.acquire("another profiler")
        try:
            with pytest.raises(ProfilerBusyError):
                backend.start(a_window(step=3))
        finally:
            PROCESS_LOCK.release()
        (path,) = written(pending, tmp_path)
        assert self.stages_in(path) == {"update"}
