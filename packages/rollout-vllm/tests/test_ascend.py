"""Tests of captures of vllm-ascend: the options without effect, and its folders.

vllm-ascend was never run, because no NPU was available. Its behaviour is read from its code
(test_ascend_wheels.py): a worker makes its profiler at the first start, keeps the name of that start, and
writes a folder at each stop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope.files.layout import sidecar_of
from stepscope.files.passes import PassFile
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope_vllm._capture import options
from stepscope_vllm._capture.session import Desk, ReplicaProfiler
from stepscope_vllm._driving import ascend_profiler
from stepscope_vllm._driving.in_process import InProcessTarget
from stepscope_vllm._driving.target import Started
from stepscope_vllm._files.traces import Layout
from stepscope_vllm._profiler import VllmProfiler
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


NEWEST = ascend_profiler.Ascend(
    "vllm-ascend 0.30.0",
    {
        "profiler_level": "Level1",
        "export_type": "Text",
        "msprof_tx": "False",
        "with_stack": "False",
        "with_modules": "profiler_config.torch_profiler_with_stack",
        "profile_memory": "profiler_config.torch_profiler_with_memory",
    },
)


@pytest.mark.parametrize("ascend", [None, NEWEST])
def test_what_vllm_ascend_hard_codes_is_reported_where_it_is_installed(
    tmp_path: Path, ascend: ascend_profiler.Ascend | None
) -> None:
    capture = a_capture(tmp_path, record_shapes=True, with_stack=True)
    unable = options.unable(
        capture, {"profiler": "torch"}, dialect_of(()), "0.32.0", aimed=True, ascend=ascend
    )
    named = {"npu.level", "npu.export", "npu.markers", "record_shapes", "with_stack"}
    assert unable.keys() & named == (named if ascend else set())
    if ascend:
        assert "Level1" in unable["npu.level"]
        assert "Fix: stepscope analyse" in unable["npu.export"]
        assert "msprof_tx=False" in unable["npu.markers"]
        assert "whoever calls" in unable["npu.markers"]


def test_a_check_says_what_no_capture_will_have_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ascend_profiler, "installed", lambda: NEWEST)
    monkeypatch.setattr(ascend_profiler, "_told", False)
    for _ in range(2):
        assert list(ascend_profiler.check({}, {})) == ["npu.level", "npu.export", "npu.markers"]
    [record] = caplog.records
    assert "records at Level1" in record.message
    assert "record_request" in record.message


def test_without_vllm_ascend_a_check_has_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    assert ascend_profiler.check({}, {}) == {}
    assert caplog.records == []


def test_an_engine_whose_profiler_its_vllm_ascend_does_not_look_at_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.13 has a `profiler_config`, but vllm-ascend 0.13 does not read it."""
    monkeypatch.setattr(ascend_profiler, "installed", lambda: NEWEST._replace(by_environment=True))
    monkeypatch.setattr(ascend_profiler, "_told", True)
    settings = {"torch_profiler_dir": "/a/folder"}
    with pytest.raises(EngineError, match=r"PROFILER_DIR=/a/folder"):
        ascend_profiler.check(settings, {})
    ascend_profiler.check(settings, settings)


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Install a stand-in for vllm-ascend. Provide the threads that have read its code."""
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[threading.Thread] = []

    def of_source(package: Path, who: str) -> ascend_profiler.Ascend:
        seen.append(threading.current_thread())
        return NEWEST

    monkeypatch.setattr(ascend_profiler, "of_source", of_source)
    ascend_profiler.installed.cache_clear()
    yield seen
    ascend_profiler.installed.cache_clear()


def test_the_code_of_vllm_ascend_is_read_once_and_not_on_the_event_loop(
    tmp_path: Path, readers: list[threading.Thread]
) -> None:
    profiler = object.__new__(VllmProfiler)
    calls = SimpleNamespace(dead=lambda: "engine is dead")
    engine = SimpleNamespace(version="0.32.0", dialect=None, calls=calls)
    profiler._target = engine  # type: ignore[assignment]  # it has the attributes that this test needs
    for _ in range(2):
        with pytest.raises(EngineError, match="engine is dead"):
            asyncio.run(profiler.start(a_capture(tmp_path)))
        assert ascend_profiler.installed() is NEWEST
    [reader] = readers
    assert reader is not threading.main_thread()


def test_workers_of_vllm_ascend_are_not_told_to_use_another_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """stepscope would use torch's profiler, which records no NPU."""
    target = object.__new__(InProcessTarget)
    monkeypatch.setattr(InProcessTarget, "in_this_process", property(lambda _: True))
    assert target.takes_aim()
    monkeypatch.setattr(ascend_profiler, "is_here", lambda: True)
    assert not target.takes_aim()


SAID = {
    "config": {
        "common_config": {"record_shapes": False, "with_stack": False, "with_modules": True},
        "experimental_config": {"_profiler_level": "Level1", "_msprof_tx": False, "_export_type": ["text"]},
    }
}
"""Content of `profiler_info*.json` as torch_npu writes it."""


class Ascend:
    """A stand-in for an engine with two workers of vllm-ascend, which writes their folders."""

    version = "0.32.0"
    settings: ClassVar[Mapping[str, object]] = {}
    reports: ClassVar[Sequence[Mapping[str, object]]] = ()
    layout = Layout(tp=2, pp=1, dp=1, external=False)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name: str | None = None
        self._stops = 0

    def facts(self) -> dict[str, str | int | float | bool | None]:
        return {}

    def take_passes(self) -> Sequence[PassFile]:
        return ()

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
            (path.parent / f"profiler_info_{rank}.json").write_text(json.dumps(SAID))
        return {}


class AscendProfiler(ReplicaProfiler):
    def __init__(self, desk: Desk, target: Ascend) -> None:
        super().__init__(0, desk)
        self._target = target

    @property
    def world_size(self) -> int:
        return 2

    def check(self) -> None:
        pass

    async def start(self, capture: EngineCapture) -> None:
        await self._begin(self._target, capture, {})


def captured(desk: Desk, target: Ascend, capture: EngineCapture) -> list[Artifact]:
    async def work() -> list[Artifact]:
        profiler = AscendProfiler(desk, target)
        await profiler.start(capture)
        return await profiler.stop()

    return asyncio.run(work())


def test_each_capture_gets_the_folders_of_its_own_step(tmp_path: Path) -> None:
    desk, target = Desk(), Ascend(tmp_path / "engine")
    for step in (2, 3):
        artifacts = captured(desk, target, a_capture(tmp_path, step))
        assert [(artifact.kind, artifact.rank, artifact.pid) for artifact in artifacts] == [
            ("npu_recording", 0, 70),
            ("npu_recording", 1, 71),
        ]
        assert [artifact.size_bytes for artifact in artifacts] == [len("operators" + json.dumps(SAID))] * 2
        for artifact in artifacts:
            folder = tmp_path / f"step{step}" / artifact.path
            assert (folder / "FRAMEWORK" / "torch.op_range").is_file()
            assert folder.name.startswith(f"capture{step}_")
    assert list((tmp_path / "engine").iterdir()) == []


def test_what_a_servers_recordings_say_of_themselves_is_reported(tmp_path: Path) -> None:
    """Only its recordings show that a server runs vllm-ascend, and with which options it records."""
    capture = a_capture(tmp_path, record_shapes=True, with_stack=True)
    for artifact in captured(Desk(), Ascend(tmp_path / "engine"), capture):
        assert "no setting" in artifact.ignored["record_shapes"]
        assert "records modules" in artifact.ignored["with_stack"]
        assert "Level1" in artifact.ignored["npu.level"]
        assert "msprof_tx=False" in artifact.ignored["npu.markers"]
        folder = tmp_path / "step2" / artifact.path
        sidecar = msgspec.json.decode(sidecar_of(folder).read_bytes(), type=Sidecar)
        assert sidecar.options == {"level": "level1", "export": "text", "markers": False}


def test_a_recording_that_says_nothing_of_itself_is_kept_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAID, "config", None)
    for artifact in captured(Desk(), Ascend(tmp_path / "engine"), a_capture(tmp_path)):
        assert artifact.ignored == {}
