"""The backends against their contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.backends import Backend
from stepscope.backends.torch.backend import TorchBackend
from stepscope.backends.window_thread import MAIN, OWNER, thread_for_window
from stepscope.config import ProfileConfig, TorchConfig
from stepscope.testing.backend_conformance import BackendConformance, MakeBackend
from stepscope.testing.fake_backend import FakeBackend


class TestFakeBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return FakeBackend

    def stages_in(self, path: Path) -> set[str]:
        events: list[str] = json.loads(path.read_text())["events"]
        return {event.removeprefix("actor.") for event in events}

    def fail_halfway(self, backend: Backend) -> Callable[[], None]:
        assert isinstance(backend, FakeBackend)
        backend.fails_to_start = True
        return lambda: setattr(backend, "fails_to_start", False)


@pytest.mark.needs("torch")
class TorchConformance(BackendConformance):
    def work(self) -> None:
        import torch

        torch.ones(8, 8) @ torch.ones(8, 8)

    def stages_in(self, path: Path) -> set[str]:
        events = json.loads(path.read_text())["traceEvents"]
        assert any(event["name"] == "aten::matmul" for event in events)
        return {event["name"][6:] for event in events if event["name"].startswith("actor.")}

    def fail_halfway(self, backend: Backend) -> Callable[[], None]:
        """torch starts, and then refuses the metadata."""
        from torch.profiler.profiler import _KinetoProfile

        original = _KinetoProfile.add_metadata_json

        def refuse(*_: object) -> None:
            raise RuntimeError("no metadata today")

        _KinetoProfile.add_metadata_json = refuse  # type: ignore[method-assign, assignment]  # a fault
        return lambda: setattr(_KinetoProfile, "add_metadata_json", original)


class TestTorchBackendOnTheMainThread(TorchConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        assert thread_for_window(all_threads=False) is MAIN
        return lambda: TorchBackend(ProfileConfig())


class TestTorchBackendOnAllThreads(TorchConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        assert thread_for_window(all_threads=True) is OWNER
        return lambda: TorchBackend(ProfileConfig(torch=TorchConfig(all_threads=True)))
