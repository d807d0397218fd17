"""The contract of a backend, for the nsys backend: `real/test_nsys.py` starts pytest with it under nsys."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from packages.core.tests.real.test_nsys import CONFIG, ranges
from stepscope.backends import nsys
from stepscope.backends.nsys import NsysBackend
from stepscope.testing.backend_conformance import BackendConformance, MakeBackend, a_window, written


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
        assert len(backend.stop()) == 1
        assert self._record(make_backend(), a_window(), tmp_path)
