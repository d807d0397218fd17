"""Tests of copying a trace from the disk of a worker on another host.

The other disk is a folder here. `real/test_vllm_more.py` has a real worker with a disk of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import EngineError
from stepscope_vllm import WorkerExtension
from stepscope_vllm._driving import in_process
from stepscope_vllm._engine_side import extension


class Workers:
    """A stand-in for an engine's two workers. The second worker's root folder is `disk`."""

    def __init__(self, disk: Path, wrote: Path) -> None:
        self.disk = disk
        self._workers: list[Any] = [WorkerExtension(), WorkerExtension()]
        self._workers[1]._stepscope_wrote = [f"{disk}{wrote}"]

    async def call(self, method: str, name: str, args: Sequence[Any]) -> list[bytes | None]:
        path, offset = args
        return [worker.stepscope_read(f"{self.disk}{path}", offset) for worker in self._workers]


def reports(*wrote: Path) -> list[dict[str, Any]]:
    return [{"host": "near", "wrote": []}, {"host": "far", "wrote": [str(path) for path in wrote]}]


async def test_a_workers_trace_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "PIECE", 100)
    home, content = tmp_path / "step" / "a.pt.trace.json.gz", bytes(range(256)) * 3
    source = put(Path(f"{tmp_path / 'far'}{home}"), content)
    workers = Workers(tmp_path / "far", home)
    assert await in_process.bring_home(workers.call, home.parent, reports(home)) == {}
    assert home.read_bytes() == source.read_bytes() == content
    assert names(home.parent) == [home.name]


async def test_what_no_worker_has_any_more_is_named_with_its_host(tmp_path: Path) -> None:
    home = tmp_path / "step" / "a.pt.trace.json.gz"
    workers = Workers(tmp_path / "far", home)
    left = await in_process.bring_home(workers.call, home.parent, reports(home))
    assert "no worker" in left["worker on far"]
    assert names(home.parent) == []


async def test_a_file_for_another_place_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "elsewhere" / "a.pt.trace.json.gz"
    put(Path(f"{tmp_path / 'far'}{home}"), b"x")
    workers = Workers(tmp_path / "far", home)
    left = await in_process.bring_home(workers.call, tmp_path / "step", reports(home))
    assert f"not in {tmp_path / 'step'}" in left["worker on far"]
    assert not home.exists()


async def test_a_worker_hands_over_its_own_captures_files_alone(tmp_path: Path) -> None:
    worker: Any = WorkerExtension()
    assert worker.stepscope_read(str(put(tmp_path / "secret", b"x")), 0) is None
    with pytest.raises(EngineError, match="no worker has"):
        await in_process._piece(Workers(tmp_path, tmp_path / "a").call, str(tmp_path / "secret"), 0)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
