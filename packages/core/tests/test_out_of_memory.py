"""CUDA runs out of memory: a snapshot at any step, and the error comes through.

There is no GPU here. torch's part is played by `Allocator`: it calls observers as torch's allocator does,
before it raises, with the same four numbers. A real one is in test_cuda_memory.py, skipped without a device.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stepscope import ProfileConfig, capture
from stepscope._recording.fanout import worker_side
from stepscope._recording.fanout.messages import PrepareRequest
from stepscope._recording.session import budget, oom
from stepscope.backends import cuda_oom
from stepscope.backends.cuda_memory import CudaMemoryBackend
from stepscope.files.cuda_memory import OutOfMemory, read_out_of_memory
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import read_parts
from stepscope.testing.backend_conformance import a_window
from stepscope_report.cli.app import run


class Allocator:
    """torch's interface to its caching allocator."""

    def __init__(self) -> None:
        self.used = True
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.history: dict[str, object] | None = None
        self.snapshots = 0

    def record(self, enabled: str | None = "all", **options: object) -> None:
        self.history = None if enabled is None else options

    def snapshot(self) -> dict[str, object]:
        self.snapshots += 1
        return {"segments": [1], "number": self.snapshots}

    def allocate(self, size: int) -> None:
        """There is never enough."""
        for observer in self.observers:
            observer(0, size, 80 << 30, 1 << 20)
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    fake = Allocator()
    attach = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attach, fake.observers.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: fake.history is not None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.used)
    monkeypatch.setattr(cuda_oom, "_attached", False)
    monkeypatch.setattr(oom, "_watch", None)
    yield fake
    cuda_oom.unwatch()
    waiting = cuda_oom._waiting
    if waiting is not None:
        waiting.join(20)


def a_config(tmp_path: Path, **settings: object) -> ProfileConfig:
    memory = {"oom_any_step": "snapshot", **settings}
    return ProfileConfig.from_mapping(
        {"save_path": str(tmp_path / "run"), "steps": [100], "cuda_memory": memory}
    )


def kept(config: ProfileConfig) -> list[OutOfMemory]:
    return read_out_of_memory(RunLayout(config.save_path))


def runs_out(cuda: Allocator, size: int = 1 << 40) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        cuda.allocate(size)


def test_at_a_step_that_is_not_captured_a_snapshot_is_kept_and_the_error_comes_through(
    tmp_path: Path, cuda: Allocator
) -> None:
    config = a_config(tmp_path)
    with capture(7, config=config, rank=3):
        runs_out(cuda)
    (record,) = kept(config)
    assert (record.step, record.process.rank, record.asked_bytes) == (7, 3, 1 << 40)
    assert (record.limit_bytes, record.free_bytes) == (80 << 30, 1 << 20)
    file = RunLayout(config.save_path).oom / str(record.snapshot)
    assert pickle.loads(file.read_bytes()) == {"segments": [1], "number": 1}
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_captured_step_of_the_tool_has_its_summary_and_its_snapshot(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": []})
    config = a_config(tmp_path).replace(steps=[1], tool="cuda_memory")
    with capture(1, config=config, rank=0) as opened:
        pass
    opened.result.raise_for_missing(20)
    traces = RunLayout(config.save_path).step(1).traces
    assert {path.suffix for path in traces.rglob("*_cuda_memory_*") if ".meta" not in path.name} == {
        ".gz", ".pickle",
    }  # fmt: skip


def test_by_default_nothing_is_attached(tmp_path: Path, cuda: Allocator) -> None:
    config = a_config(tmp_path, oom_any_step="off")
    with capture(7, config=config):
        runs_out(cuda)
    assert cuda.observers == []
    assert kept(config) == []


def test_a_process_that_does_not_use_cuda_yet_is_waited_for(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_oom, "POLL_S", 0.001)
    cuda.used = False
    config = a_config(tmp_path)
    with capture(1, config=config):
        assert cuda.observers == []
        waiting = cuda_oom._waiting
        assert waiting is not None
        cuda.used = True
        waiting.join(20)
        runs_out(cuda)
    assert len(kept(config)) == 1


def test_a_worker_keeps_them_from_prepare_on(tmp_path: Path, cuda: Allocator) -> None:
    config = a_config(tmp_path)
    worker_side.prepare_worker(PrepareRequest(config=config, run_id="0a0b0c0d", role="actor", position=5))
    runs_out(cuda)
    (record,) = kept(config)
    assert (record.process.role, record.process.rank, record.run_id, record.step) == (
        "actor", 5, "0a0b0c0d", None,
    )  # fmt: skip


def test_a_run_keeps_a_few_snapshots_and_a_record_of_each_error(tmp_path: Path, cuda: Allocator) -> None:
    config = a_config(tmp_path, oom_snapshots=2)
    with capture(1, config=config):
        for _ in range(4):
            runs_out(cuda)
    assert [record.snapshot is not None for record in kept(config)] == [True, True, False, False]
    assert "oom_snapshots = 2" in str(kept(config)[3].why_none)
    assert cuda.snapshots == 2  # none is taken that is not kept


def test_an_allocator_that_tells_nobody_costs_a_warning_and_no_step(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    with capture(1, config=a_config(tmp_path)):
        pass
    assert "oom_any_step" in caplog.text
    assert "not yet support" in caplog.text


def test_a_disk_that_is_nearly_full_gets_the_record_alone(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "over_budget", lambda _: "budget.free_mb: 1 MB are free")
    config = a_config(tmp_path)
    with capture(1, config=config):
        runs_out(cuda)
    (record,) = kept(config)
    assert record.snapshot is None
    assert str(record.why_none).startswith("budget.free_mb: 1 ")


def test_a_folder_that_cannot_be_written_does_not_stand_before_the_error(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    config = a_config(tmp_path).replace(record="off")  # nothing else writes into the folder
    with capture(0, config=config):  # the run's first: it checks the folder
        pass
    shutil.rmtree(config.save_path, ignore_errors=True)
    Path(config.save_path).write_text("in the way")
    with capture(1, config=config):
        runs_out(cuda)


def test_a_snapshot_that_fails_leaves_the_record_and_the_error(
    tmp_path: Path, cuda: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fail)
    config = a_config(tmp_path)
    with capture(1, config=config):
        runs_out(cuda)
    assert len(kept(config)) == 1


def test_in_a_capture_of_another_tool_the_manifest_names_it(tmp_path: Path, cuda: Allocator) -> None:
    config = a_config(tmp_path).replace(steps=[1], roles={"*": {"profiler": "off"}})
    with capture(1, config=config):
        runs_out(cuda)
    (part,), _ = read_parts(RunLayout(config.save_path).step(1))
    (item,) = (item for item in part.expected if item.name == "CUDA out of memory")
    assert f"oom/{kept(config)[0].snapshot}" in str(item.reason)


def test_with_history_the_allocator_records_between_captures_and_windows_have_their_own(
    tmp_path: Path, cuda: Allocator
) -> None:
    config = a_config(tmp_path, oom_any_step="history", max_entries=77)
    with capture(1, config=config):
        assert cuda.history is not None
        assert cuda.history["max_entries"] == 77
        backend = CudaMemoryBackend(config)
        backend.start(a_window())  # not refused as the history of other code
        runs_out(cuda)
        kinds = [artifact.kind for artifact in backend.stop()]
        assert {"cuda_memory_snapshot", "cuda_memory_oom_snapshot"} <= set(kinds)
        assert kept(config) == []
        assert cuda.history is not None  # on again after the window
        runs_out(cuda)
    assert [record.history for record in kept(config)] == [True]
    assert len(cuda.observers) == 1


def test_a_history_of_other_code_is_left_to_it(tmp_path: Path, cuda: Allocator) -> None:
    cuda.record(max_entries=5)
    config = a_config(tmp_path, oom_any_step="history")
    with capture(1, config=config):
        runs_out(cuda)
    assert cuda.history == {"max_entries": 5}
    assert [record.history for record in kept(config)] == [False]


def test_ls_lists_them_also_in_a_run_without_a_captured_step(
    tmp_path: Path, cuda: Allocator, capsys: pytest.CaptureFixture[str]
) -> None:
    config = a_config(tmp_path)
    with capture(7, config=config, rank=3):
        runs_out(cuda)
    run(["ls", config.save_path])
    shown = capsys.readouterr().out
    assert "out of memory" in shown
    assert "trainer_rank3" in shown
