"""The cuda_memory backend. What needs a device is skipped where there is none; nothing stands in for one."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepscope.backends import load_backend
from stepscope.backends.cuda_memory import CudaMemoryBackend, history_options
from stepscope.config import CudaMemoryConfig, ProfileConfig
from stepscope.errors import BackendError
from stepscope.testing.backend_conformance import BackendConformance, MakeBackend, a_window, discard, written

no_device = not torch.cuda.is_available()
needs_device = pytest.mark.skipif(no_device, reason="needs a CUDA device")


@pytest.mark.skipif(not no_device, reason="there is a CUDA device")
class TestWithoutADevice:
    def test_check_says_what_is_missing_and_the_fix(self) -> None:
        with pytest.raises(BackendError, match=r"CUDA.*tool: torch"):
            CudaMemoryBackend(ProfileConfig()).check()

    def test_start_fails_and_leaves_nothing(self) -> None:
        backend = CudaMemoryBackend(ProfileConfig())
        for _ in range(2):
            with pytest.raises(BackendError, match="Fix: tool: torch"):
                backend.start(a_window())
            assert backend.stop() == []


@pytest.mark.parametrize("stacks", ["none", "python", "all"])
def test_the_options_fit_the_signature_of_this_torch(stacks: str) -> None:
    config = CudaMemoryConfig(max_entries=5, stacks=stacks)  # type: ignore[arg-type]  # one of the three
    options = history_options(config)
    bound = inspect.signature(torch.cuda.memory._record_memory_history).bind(**options)
    assert bound.arguments["max_entries"] == 5
    assert bound.arguments["context"] == (None if stacks == "none" else "all")
    assert bound.arguments["stacks"] == ("all" if stacks == "all" else "python")


def test_what_it_calls_exists_in_this_torch() -> None:
    inspect.signature(torch.cuda.memory._snapshot).bind()
    inspect.signature(torch.cuda.memory._record_memory_history).bind(None)


@needs_device
class TestOnADevice(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda: load_backend(
            "cuda_memory", ProfileConfig(cuda_memory=CudaMemoryConfig(max_entries=1000))
        )

    def work(self) -> None:
        torch.ones(1 << 20, device="cuda").sum().item()

    def test_a_snapshot_holds_the_allocations_of_its_window(self, tmp_path: Path) -> None:
        backend = CudaMemoryBackend(ProfileConfig())
        backend.start(a_window())
        self.work()
        _, path = written(backend.stop(), tmp_path)
        snapshot = pickle.loads(path.read_bytes())
        assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)

    def test_an_out_of_memory_error_leaves_a_snapshot_and_comes_through(self, tmp_path: Path) -> None:
        backend = CudaMemoryBackend(ProfileConfig())
        backend.start(a_window())
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        kinds = [artifact.kind for artifact in backend.stop()]
        assert kinds == [
            "cuda_memory_summary",
            "cuda_memory_snapshot",
            "cuda_memory_oom_summary",
            "cuda_memory_oom_snapshot",
        ]

    def test_a_history_of_other_code_is_left_alone(self) -> None:
        torch.cuda.memory._record_memory_history()
        try:
            with pytest.raises(BackendError, match="by other code"):
                CudaMemoryBackend(ProfileConfig()).start(a_window())
            assert torch._C._cuda_isHistoryEnabled()
        finally:
            torch.cuda.memory._record_memory_history(None)

    @pytest.fixture(autouse=True)
    def idle_afterwards(self) -> Iterator[None]:
        yield
        backend = CudaMemoryBackend(ProfileConfig())
        backend.start(a_window())
        discard(backend.stop())
