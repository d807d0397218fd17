"""What is said of vllm-ascend before it is profiled, and what becomes of the folders that it leaves.

It was not run: no NPU here. What it does is read from its code: a worker's profiler is made at its first
start, keeps the name it was given then, and leaves a folder of the Ascend profiler at each stop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stepscope.engines import EngineCapture
from stepscope.files.sidecar import Artifact
from stepscope_vllm import _engines, _options, _recording
from stepscope_vllm._engines import Layout, Started
from stepscope_vllm._recording import Desk, Run
from stepscope_vllm._versions import dialect_of


def a_capture(
    folder: Path, step: int = 2, *, record_shapes: bool = False, with_stack: bool = False
) -> EngineCapture:
    return EngineCapture(
        step=step,
        run_id="r",
        out_dir=str(folder / f"step{step}" / "traces"),
        step_dir=str(folder / f"step{step}"),
        name=f"capture{step}",
        replica=0,
        record_shapes=record_shapes,
        with_stack=with_stack,
    )


@pytest.mark.parametrize("ascend", [False, True])
def test_what_vllm_ascend_hard_codes_is_reported_where_it_is_installed(tmp_path: Path, ascend: bool) -> None:
    capture = a_capture(tmp_path, record_shapes=True, with_stack=True)
    unable = _options.unable(
        capture, {"profiler": "torch"}, dialect_of(()), "0.32.0", aimed=True, ascend=ascend
    )
    assert ("record_shapes" in unable, "with_stack" in unable) == (ascend, ascend)


def test_workers_of_vllm_ascend_are_not_told_to_use_another_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours would be torch's, which sees no NPU."""
    driver = object.__new__(_engines.Driver)
    monkeypatch.setattr(_engines.Driver, "in_this_process", property(lambda _: True))
    assert driver.takes_aim()
    monkeypatch.setattr(_engines, "on_ascend", lambda: True)
    assert not driver.takes_aim()


class Ascend:
    """An engine with two workers of vllm-ascend, as far as its folders go."""

    version = "0.32.0"
    layout = Layout(tp=2, pp=1, dp=1, external=False)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name: str | None = None
        self._stops = 0

    def facts(self) -> dict[str, str | int | float | bool | None]:
        return {}

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started:
        self._name = self._name or name
        return Started(self.folder, named=True, aimed=False)

    async def stop(self) -> dict[str, str]:
        self._stops += 1
        for rank in range(2):
            worker = f"{self._name}_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}_{70 + rank}"
            path = self.folder / f"{worker}_{self._stops:017}_ascend_pt" / "FRAMEWORK"
            path.mkdir(parents=True)
            (path / "torch.op_range").write_bytes(b"operators")
            (path.parent / f"profiler_info_{rank}.json").write_text("{}")
        return {}


def captured(desk: Desk, target: Ascend, capture: EngineCapture) -> list[Artifact]:
    async def work() -> list[Artifact]:
        await _recording.start(desk, Run(desk, target, capture, {}))
        artifacts, _ = await _recording.stop(desk)
        return artifacts

    return asyncio.run(work())


def test_each_capture_gets_the_folders_of_its_own_step(tmp_path: Path) -> None:
    desk, target = Desk(), Ascend(tmp_path / "engine")
    for step in (2, 3):
        found = captured(desk, target, a_capture(tmp_path, step))
        assert [(artifact.kind, artifact.rank, artifact.pid) for artifact in found] == [
            ("npu_recording", 0, 70),
            ("npu_recording", 1, 71),
        ]
        assert [artifact.size_bytes for artifact in found] == [11, 11]
        for artifact in found:
            folder = tmp_path / f"step{step}" / artifact.path
            assert (folder / "FRAMEWORK" / "torch.op_range").is_file()
            assert folder.name.startswith(f"capture{step}_")
    assert list((tmp_path / "engine").iterdir()) == []
