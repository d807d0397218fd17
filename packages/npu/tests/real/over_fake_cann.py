"""Tests of the backend on the unmodified torch_npu, Python and C++, over a stand-in for CANN.

`test_torch_npu.py` starts pytest on this file in a process over the stand-in.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch_npu.profiler import dynamic_profile

from stepscope.backends import Backend, PendingArtifact, SpanInfo
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.torch.backend import TorchBackend
from stepscope.config import ProfileConfig
from stepscope.errors import ProfilerBusyError
from stepscope.testing.backend_conformance import (
    BackendConformance,
    MakeBackend,
    a_window,
    in_thread,
    written,
)
from stepscope_npu._backend import NpuBackend
from tests.tree import ROOT

LOG = Path(os.environ["FAKE_CANN_LOG"])


@pytest.fixture(autouse=True)
def empty_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    here = tmp_path_factory.mktemp("working_directory")
    monkeypatch.chdir(here)
    LOG.write_text("")
    yield
    gc.collect()
    assert PROCESS_LOCK.holder is None
    assert list(here.iterdir()) == []  # torch_npu wrote into the working directory


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., NpuBackend]:
    def backend(**npu: object) -> NpuBackend:
        run = tmp_path.with_name(f"{tmp_path.name}-run")  # not in tmp_path, where tests count files
        data = {"tool": "npu", "save_path": str(run), "npu": npu}
        return NpuBackend(ProfileConfig.from_mapping(data))

    return backend


def calls() -> list[str]:
    """Return the calls of CANN's profiler and of mstx, in order."""
    return [line for line in LOG.read_text().splitlines() if line.startswith(("aclprof", "mstx", "sync"))]


def ranges(folder: Path) -> list[str]:
    """Return `domain:name` of each mstx range that the stand-in saw, without those of torch_npu."""
    [ranges] = folder.glob("PROF_*/host/fake_ranges.tsv")
    lines = [line.split("\t") for line in ranges.read_text().splitlines()]
    return [f"{domain}:{name}" for _, _, _, domain, name in lines if not name.startswith("ProfilerStep")]


def operators(folder: Path) -> bytes:
    """Return the operators' file of torch_npu's C++, which holds their names verbatim."""
    file = folder / "FRAMEWORK" / "torch.op_range"
    return file.read_bytes() if file.exists() else b""


def mark(backend: NpuBackend, stage: str = "update") -> None:
    with backend.range(SpanInfo(stage=stage, role="actor", span=1, is_async=False)):
        torch.ones(8, 8) @ torch.ones(8, 8)


def record(backend: NpuBackend, folder: Path) -> Path:
    backend.start(a_window())
    mark(backend)
    [path] = written(backend.stop(), folder)
    return path


class TestNpuBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self, make: Callable[..., NpuBackend]) -> MakeBackend:
        return make

    def work(self) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)

    def stages_in(self, path: Path) -> set[str]:
        return {name.removeprefix("default:actor.") for name in ranges(path)}

    def fail_halfway(self, backend: Backend) -> Callable[[], None]:
        """Make `add_metadata_json` fail, which the backend calls after torch_npu has started to record."""
        profile = torch_npu.profiler.profile
        original = profile.add_metadata_json

        def refuse(*_: object) -> None:
            raise RuntimeError("no metadata today")

        profile.add_metadata_json = refuse
        return lambda: setattr(profile, "add_metadata_json", original)


def test_one_window_makes_these_calls_into_cann(make: Callable[..., NpuBackend], tmp_path: Path) -> None:
    make().prepare()
    record(make(), tmp_path / "out")
    told = [call for call in calls() if "ProfilerStep" not in call]
    assert [call.split("(")[0] for call in told] == [
        "aclprofInit",
        "aclprofCreateConfig",
        "aclprofStart",
        "aclprofRegisterDeviceCallback",
        "mstxRangeStartA",
        "mstxRangeEnd",
        "synchronize",
        "mstxRangeEnd",  # torch_npu's own range around a mini-batch
        "synchronize",
        "aclprofStop",
        "aclprofFinalize",
    ]
    assert "mstxRangeStartA(actor.update, (nil))" in told  # no stream: the range is where the code is


def test_operators_of_the_host_and_markers_are_recorded(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    folder = record(make(), tmp_path / "out")
    assert b"aten::matmul" in operators(folder)
    assert ranges(folder) == ["default:actor.update"]
    assert json.loads((folder / "profiler_metadata.json").read_text())["stepscope"]["role"] == "actor"


def test_a_start_that_cann_refuses_is_seen_on_disk_alone(
    make: Callable[..., NpuBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    monkeypatch.setenv("FAKE_CANN_FAIL", "aclprofStart")
    backend.start(a_window())  # torch_npu raises nothing, and prints nothing
    mark(backend)
    [artifact] = backend.stop()
    assert "no PROF_* folder" in str(artifact.lacking)
    [folder] = written([artifact], tmp_path / "out")
    assert b"aten::matmul" in operators(folder)


def test_a_domain_that_is_left_out_is_not_recorded(make: Callable[..., NpuBackend], tmp_path: Path) -> None:
    backend = make()
    backend.start(a_window())
    mstx = torch_npu.npu.mstx
    for domain in ("communication", "mine"):
        mstx.range_end(mstx.range_start("x", domain=domain), domain)
    [folder] = written(backend.stop(), tmp_path / "out")
    assert ranges(folder) == ["mine:x"]


def test_markers_are_recorded_when_only_the_host_was_asked_for(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    assert ranges(record(make(contents=["cpu"]), tmp_path / "out")) == ["default:actor.update"]


def test_a_window_of_another_thread_records_its_device_its_markers_and_its_operators(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    backend = make()

    def work() -> list[PendingArtifact]:
        torch_npu.npu.set_device(1)
        backend.start(a_window())
        mark(backend)
        return backend.stop()

    [artifact] = in_thread(work)
    [folder] = written([artifact], tmp_path / "out")
    assert any(call.startswith("aclprofCreateConfig(device 1 of 1") for call in calls())
    assert ranges(folder) == ["default:actor.update"]
    assert artifact.options["operators_of"] == "test-thread"
    assert b"aten::matmul" in operators(folder)


def test_a_thread_that_opens_two_windows_has_each_operator_once_in_both(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    """With `disable_profiler_in_child_thread`, the second recording would hold each operator twice."""
    backend = make()

    def work() -> list[PendingArtifact]:
        artifacts = []
        for _ in range(2):
            backend.start(a_window())
            torch.ones(2).cumsum(0)
            artifacts += backend.stop()
        return artifacts

    folders = written(in_thread(work), tmp_path / "out")
    assert [operators(folder).count(b"aten::cumsum") for folder in folders] == [1, 1]


def test_a_thread_whose_window_another_thread_stops_is_as_before_when_it_opens_the_next(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    backend = make()

    def work() -> tuple[list[PendingArtifact], int]:
        backend.start(a_window())
        in_thread(backend.stop)[0].discard()
        torch.ones(2).cumsum(0)
        backend.start(a_window())
        torch.ones(2).cumsum(0)
        artifacts = backend.stop()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            torch.ones(2).cumsum(0)
        return artifacts, sum(event.name == "aten::cumsum" for event in theirs.events())

    artifacts, theirs = in_thread(work)
    [folder] = written(artifacts, tmp_path / "out")
    assert operators(folder).count(b"aten::cumsum") == theirs == 1


def test_a_range_may_end_after_the_window_and_on_another_thread(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    first = backend.range(SpanInfo(stage="long", role="actor", span=1, is_async=True))
    second = backend.range(SpanInfo(stage="short", role="actor", span=2, is_async=True))
    first.__enter__()
    second.__enter__()
    thread = threading.Thread(target=lambda: second.__exit__(None, None, None))
    thread.start()
    thread.join()
    artifacts = backend.stop()
    first.__exit__(None, None, None)
    [folder] = written(artifacts, tmp_path / "out")
    assert ranges(folder) == ["default:actor.long", "default:actor.short"]


def test_torch_profiler_after_this_ends_ours_and_works(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    """If the window stayed open, torch.profiler would raise: a profiler is enabled on this thread."""
    backend = make()
    backend.start(a_window())
    mark(backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in theirs.events())
    [artifact] = backend.stop()
    assert "started torch.profiler" in str(artifact.truncated)
    [folder] = written([artifact], tmp_path / "out")
    assert b"aten::matmul" in operators(folder)


def test_two_recordings_of_torch_npu_do_not_mix(make: Callable[..., NpuBackend], tmp_path: Path) -> None:
    profiler: Any = torch_npu.profiler
    backend = make()
    backend.start(a_window())
    mark(backend)
    handler = profiler.tensorboard_trace_handler(str(tmp_path / "theirs"), analyse_flag=False)
    theirs = profiler.profile(on_trace_ready=handler)
    theirs.start()
    torch.ones(2).cumsum(0)
    theirs.stop()
    [folder] = written(backend.stop(), tmp_path / "out")
    [their_folder] = (tmp_path / "theirs").glob("*_ascend_pt")
    assert b"aten::matmul" in operators(folder)
    assert b"aten::cumsum" not in operators(folder)
    assert b"aten::cumsum" in operators(their_folder)
    assert b"aten::matmul" not in operators(their_folder)


def test_dynamic_profile_ends_our_window_and_has_its_own_data(
    make: Callable[..., NpuBackend], tmp_path: Path
) -> None:
    own, theirs = tmp_path / "mine", tmp_path / "theirs"
    own.mkdir()
    theirs.mkdir()
    dynamic_profile.init(str(own))
    config = json.loads((own / "profiler_config.json").read_text())
    chosen = own / "now.json"
    chosen.write_text(json.dumps(config | {"prof_dir": str(theirs), "analyse": False, "active": 1}))
    backend = make()
    backend.start(a_window())
    torch.ones(2).cumsum(0)
    dynamic_profile.start(str(chosen))
    with pytest.raises(ProfilerBusyError, match="not stepscope's"):
        make().start(a_window())
    torch.ones(2).cumprod(0)
    dynamic_profile.step()
    [artifact] = backend.stop()
    assert "torch_npu.profiler" in str(artifact.truncated)
    [folder] = written([artifact], tmp_path / "out")
    [their_folder] = theirs.glob("*_ascend_pt")
    assert (b"aten::cumsum" in operators(folder), b"aten::cumprod" in operators(folder)) == (True, False)
    assert b"aten::cumprod" in operators(their_folder)


def test_torch_profiler_reaches_mspti_where_the_torch_backend_is_told_to(tmp_path: Path) -> None:
    """The trace has no device events, because the stand-in delivers none."""
    activities = {"activities": ["cpu", "privateuse1"]}
    config = {"tool": "torch", "save_path": str(tmp_path), "torch": activities}
    backend = TorchBackend(ProfileConfig.from_mapping(config))
    backend.start(a_window())
    torch.ones(2).cumsum(0)
    [artifact] = backend.stop()
    [path] = written([artifact], tmp_path / "out")
    assert artifact.options["activities"] == "cpu,privateuse1"
    assert "aten::cumsum" in path.read_text()
    called = [line.split("(")[0] for line in LOG.read_text().splitlines() if line.startswith("mspti")]
    assert list(dict.fromkeys(called)) == [
        "msptiSubscribe",
        "msptiActivityRegisterCallbacks",
        "msptiActivityEnable",
        "msptiActivityFlushAll",
        "msptiUnsubscribe",
    ]


@pytest.mark.parametrize("command", ["window", "threads", "cost"])
def test_what_the_page_for_a_machine_with_npus_has_one_run_runs(command: str, tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "examples" / "ascend_check.py"))
    settings = {"tool": "npu", "save_path": str(tmp_path), "steps": [0, 1]}
    config = ProfileConfig.from_mapping(settings | {"roles": {"*": {"ranks": "all"}}})
    check["COMMANDS"][command](check["Trainer"]("cpu", 8), config)
    captured = {"window": 2, "threads": 2, "cost": 12}
    folders = sorted(tmp_path.rglob("*_ascend_pt"))
    assert len(folders) == captured[command]
    if command != "cost":
        assert [operators(folder).count(b"aten::matmul") for folder in folders] == [20, 20]
        assert all(ranges(folder) == ["default:actor.update"] for folder in folders)
