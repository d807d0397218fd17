"""Tests of the backend on the torch_npu of one wheel: calls into C++, failures, and recordings of other code.

This file is long, because each test is a short scene over the same stand-in.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import stepscope
from packages.npu.tests.on_a_wheel.unpacked import Compiled
from stepscope import ProfileConfig, capture, profile_step, span
from stepscope.backends import PendingArtifact, SpanInfo
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.torch.backend import TorchBackend
from stepscope.backends.window_thread import Late
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Expectation
from stepscope.files.manifest_parts import read_parts
from stepscope.files.sidecar import Sidecar
from stepscope.testing.backend_conformance import a_window, in_child, in_thread, written
from stepscope_npu import _disk, _operators, _window
from stepscope_npu._backend import NpuBackend

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILY = os.environ["TORCH_NPU_FAMILY"]
PATCHED = "patched_by_torch_npu"


@pytest.fixture
def make(compiled: Compiled, tmp_path: Path) -> Iterator[Any]:
    made: list[NpuBackend] = []

    def backend(**npu: object) -> NpuBackend:
        data = {"tool": "npu", "save_path": str(tmp_path / "run"), "npu": npu}
        made.append(NpuBackend(ProfileConfig.from_mapping(data)))
        return made[-1]

    yield backend
    for process in made:
        process.stop()


@pytest.fixture
def torch_npu() -> ModuleType:
    import torch_npu as module

    return module  # type: ignore[no-any-return]  # an engine: mypy does not look


@pytest.fixture
def their_profile(torch_npu: Any, tmp_path: Path) -> Any:
    """Return a function that makes the user's own profiler, which writes to `tmp_path / "theirs"`."""

    def profile() -> Any:
        profiler = torch_npu.profiler
        handler = profiler.tensorboard_trace_handler(str(tmp_path / "theirs"), "mine", analyse_flag=False)
        return profiler.profile(on_trace_ready=handler)

    return profile


def mark(backend: NpuBackend, stage: str = "update", is_async: bool = False) -> None:
    with backend.range(SpanInfo(stage=stage, role="actor", span=1, is_async=is_async)):
        pass


def record(backend: NpuBackend, step: int = 2) -> list[PendingArtifact]:
    backend.start(a_window(step=step))
    mark(backend)
    return backend.stop()


def messages(folder: Path) -> list[str]:
    [ranges] = folder.glob("PROF_*/host/ranges.json")
    return [one["message"] for one in json.loads(ranges.read_text())]


# Calls into C++, compared with recorded calls.

SCENES: dict[str, dict[str, object]] = {
    "the defaults": {},
    "an empty list of contents": {"contents": []},
    "the host alone, with markers": {"contents": ["cpu"]},
    "the host alone, without markers": {"contents": ["cpu"], "markers": False},
    "all contents": {"contents": ["npu", "cpu", "memory", "shapes", "module", "stack"]},
    "level1 with counters": {"level": "level1", "aic_metrics": "PipeUtilization", "l2_cache": True},
    "markers alone": {"level": "level_none"},
    "database": {"export": "db"},
    "domains": {"domains_include": ["weights"]},
    "all domains": {"domains_exclude": []},
    "extra": {"extra": {"record_op_args": True}},
}


def test_the_calls_into_cpp_are_those_that_were_seen_before(
    make: Any, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    msprof = tmp_path / "msprof"  # the oldest torch_npu checks the help of msprof before `db`
    msprof.write_text("#!/bin/sh\necho '  --type  text db'\n")
    msprof.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    seen = []
    for name, npu in SCENES.items():
        compiled.calls.clear()
        written(record(make(**npu)), tmp_path / name)
        seen += [f"== {name}", *compiled.calls]
    compiled.calls.clear()
    backend = make(schedule={"skip_first": 1, "warmup": 1, "active": 2, "repeat": 2})
    backend.start(a_window())
    for _ in range(8):
        mark(backend)
        backend.advance()
    written(backend.stop(), tmp_path / "schedule")
    seen += ["== a schedule over eight mini-batches", *compiled.calls, ""]
    golden = GOLDENS / f"calls_{FAMILY}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text("\n".join(seen))
    assert "\n".join(seen) == golden.read_text()


@pytest.mark.parametrize("level", ["level_none", "level0", "level1", "level2"])
def test_a_level_is_torch_npus_of_that_name(make: Any, compiled: Compiled, level: str) -> None:
    for artifact in record(make(level=level)):
        artifact.discard()
    [started] = [call for call in compiled.calls if call.startswith("_start_profiler")]
    assert f"trace_level='{level.capitalize()}'" in started


def test_data_is_simplified_as_asked(make: Any, tmp_path: Path) -> None:
    """The setting does not reach C++: the analysis reads it from the recording."""
    for kept in (True, False):
        [folder] = written(record(make(data_simplification=kept)), tmp_path / str(kept))
        [info] = folder.glob("profiler_info*.json")
        config = json.loads(info.read_text())["config"]
        assert config["experimental_config"]["_data_simplification"] is kept
        assert config["common_config"]["schedule"]["active"] == 1


def test_markers_survive_domains_that_do_not_name_their_own(make: Any, tmp_path: Path) -> None:
    [artifact] = record(make(domains_include=["weights"]))
    [folder] = written([artifact], tmp_path / "out")
    assert messages(folder) == ["actor.update"]


def test_what_this_torch_npu_lacks_is_ignored_and_recorded_or_refused(make: Any) -> None:
    [artifact] = record(make())
    assert ("npu.domains_exclude" in artifact.ignored) == (FAMILY == "A")
    artifact.discard()
    with pytest.raises(BackendError, match=r"'flux_capacitor'.*op_"):
        make(extra={"flux_capacitor": True}).check()


def test_device_data_that_nobody_asked_for_is_recorded_for_the_markers_and_that_is_said(
    make: Any, compiled: Compiled
) -> None:
    [forced], [asked] = record(make(contents=["cpu"])), record(make(contents=["memory"], markers=False))
    for artifact in (forced, asked):
        artifact.discard()
    assert "drops the markers" in forced.ignored["npu.contents"]
    assert "npu.contents" not in asked.ignored
    started = [call for call in compiled.calls if call.startswith("_start_profiler")]
    assert [call.rpartition(", ")[2] for call in started] == ["CPU+NPU)", "CPU)"]


def test_a_counter_that_this_torch_npu_has_not_is_refused_with_those_that_it_has(make: Any) -> None:
    backend = make(level="level1", aic_metrics="MemoryAccess")
    if FAMILY == "A":
        with pytest.raises(BackendError, match=r"'MemoryAccess'.*MemoryUB"):
            backend.check()
    else:
        backend.check()


def test_a_database_without_msprof_is_refused_by_the_oldest_and_left_to_the_analysis_by_the_others(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    msprof = tmp_path / "msprof"
    for known in (None, "no such thing"):
        if known is not None:
            msprof.write_text(f"#!/bin/sh\necho '{known}'\n")
            msprof.chmod(0o755)
        if FAMILY == "A":
            with pytest.raises(BackendError, match=r"export db.*msprof"):
                make(export="db").check()
        else:
            make(export="db").check()


def test_nothing_is_analysed_in_this_process(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_npu.profiler.profiler_interface import _ProfInterface

    analysed: list[object] = []
    monkeypatch.setattr(_ProfInterface, "analyse", lambda *_, **__: analysed.append(1))
    [artifact] = record(make())
    artifact.discard()
    assert analysed == []


def test_host_data_of_the_system_is_passed_through_where_it_is_known(make: Any) -> None:
    backend = make(extra={"host_sys": ["cpu"], "gc_detect_threshold": 1.0})
    if FAMILY == "A":
        with pytest.raises(BackendError, match=r"extra .*'host_sys'"):
            backend.check()
    else:
        [artifact] = record(backend)
        artifact.discard()
        assert artifact.options["extra.host_sys"] == "cpu"


def test_settings_that_have_no_effect_print_no_warning(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for artifact in (*record(make()), *record(make(markers=False))):
        artifact.discard()
    assert "WARN" not in capsys.readouterr().out


def test_the_version_of_cann_is_in_the_sidecar_where_torch_npu_has_found_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cann"
    home.mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    [unknown] = record(make())
    (home / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.3.RC1\n")
    [known] = record(make())
    for artifact in (unknown, known):
        artifact.discard()
    assert "cann" not in unknown.versions
    assert known.versions.get("cann") == (None if FAMILY == "A" else "8.3.RC1")


# Defects of verl's NPU profiler that stepscope must not have.


def test_verl_defect_a_stage_that_raises_leaves_its_range_open(
    make: Any, compiled: Compiled, tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    with pytest.raises(ZeroDivisionError):
        with backend.range(SpanInfo(stage="update", role="actor", span=1, is_async=False)):
            raise ZeroDivisionError
    assert compiled.calls[-1].startswith("_range_end(N")
    [folder] = written(backend.stop(), tmp_path / "out")
    assert messages(folder) == ["actor.update"]


def test_verl_defect_steps_share_a_folder(captured: Any) -> None:
    config = captured(steps=[2, 3])
    for step in (2, 3):
        with capture(step, config=config) as block:
            Trainer().update()
        block.result.wait()
    folders = list(Path(config.save_path).rglob("*_ascend_pt"))
    assert sorted(path.relative_to(config.save_path).parts[0] for path in folders) == [
        "step_000002",
        "step_000003",
    ]
    assert all(messages(folder) == ["actor.update"] for folder in folders)


# Whole captures.


class Trainer:
    @profile_step(role="actor")
    def update(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("mine")

    @profile_step(role="ref", stage="log_prob")
    async def log_prob(self, gate: asyncio.Event) -> None:
        await gate.wait()


@pytest.fixture
def captured(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")

    def config(**settings: object) -> ProfileConfig:
        return ProfileConfig.from_mapping(
            {"tool": "npu", "save_path": str(tmp_path / "run"), "steps": [2], **settings}
        )

    return config


def outcome(config: ProfileConfig, name: str) -> Expectation:
    layout = RunLayout(config.save_path).step(2)
    parts, _ = read_parts(layout)
    [outcome] = [item for part in parts for item in part.expected if item.name == name]
    return outcome


def test_a_capture_leaves_a_folder_with_a_sidecar_that_has_three_clocks(captured: Any) -> None:
    config = captured()
    with capture(2, config=config) as block:
        Trainer().update()
    block.result.wait()
    item = outcome(config, "npu trace")
    assert item.state == "ok"
    [artifact] = item.artifacts
    root = RunLayout(config.save_path).step(2).root
    folder = root / artifact.path
    assert folder.parts[-2] == "actor" or folder.parts[-3] == "traces"
    sidecar = msgspec.json.decode(Path(f"{folder}.meta.json").read_bytes(), type=Sidecar)
    for anchor in (sidecar.opened, sidecar.closed):
        assert anchor is not None
        assert anchor.raw_ns is not None
    assert sidecar.artifact.kind == "npu_recording"
    assert sidecar.options["contents"] == "npu,cpu"
    assert json.loads((folder / "profiler_metadata.json").read_text())["stepscope"]["step"] == 2
    assert not (root / ".recordings").exists()


def test_discrete_mode_has_a_folder_for_each_stage_and_role(captured: Any) -> None:
    config = captured(mode="discrete", roles={"*": {"ranks": "all"}})
    with capture(2, config=config) as block:
        Trainer().update()

        async def both() -> None:
            gate = asyncio.Event()
            gate.set()
            await Trainer().log_prob(gate)

        asyncio.run(both())
    block.result.wait()
    folders = sorted(Path(config.save_path).rglob("*_ascend_pt"))
    assert [path.parent.name for path in folders] == ["actor", "ref"]
    assert [messages(path) for path in folders] == [["actor.update"], ["ref.log_prob"]]


def test_interleaved_tasks_have_markers_that_overlap(captured: Any) -> None:
    async def both() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(Trainer().log_prob(gate)) for gate in (first, second)]
        await asyncio.sleep(0)
        first.set()  # the first to begin is the first to end: push and pop would cross
        await asyncio.sleep(0)
        second.set()
        await asyncio.gather(*tasks)

    config = captured()
    with capture(2, config=config) as block:
        asyncio.run(both())
    block.result.wait()
    [folder] = Path(config.save_path).rglob("*_ascend_pt")
    assert messages(folder) == ["ref.log_prob", "ref.log_prob"]


def test_a_capture_without_device_data_is_partial_and_says_so(captured: Any, compiled: Compiled) -> None:
    compiled.no_prof = True
    config = captured()
    with capture(2, config=config) as block, span("work"):
        pass
    block.result.wait()
    item = outcome(config, "npu trace")
    assert item.state == "partial"
    assert item.reason is not None
    assert "no PROF_* folder" in item.reason
    assert len(item.artifacts) == 1


def test_a_capture_that_the_profiler_fails_goes_on(captured: Any, compiled: Compiled) -> None:
    compiled.fails["_start_profiler"] = "CANN 8 is not for this driver"
    config = captured()
    with capture(2, config=config) as block:
        Trainer().update()
    block.result.wait()
    item = outcome(config, "npu trace")
    assert item.state == "failed"
    assert "this driver" in str(item.reason)


def test_an_analysis_that_fails_leaves_the_recording_and_says_so(captured: Any) -> None:
    config = captured(npu={"analysis": True})  # no process can import this torch_npu by itself
    with capture(2, config=config) as block, span("work"):
        pass
    block.result.wait()
    item = outcome(config, "npu trace")
    assert item.state == "ok"
    [artifact] = item.artifacts
    assert "wrote no timeline" in artifact.ignored["npu.analysis"]
    assert "named 'torch_npu'" in artifact.ignored["npu.analysis"]


# Failures that torch_npu swallows.


def test_a_start_that_comes_to_no_call_at_all_is_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_npu.profiler._profiler_path_creator import ProfPathCreator

    def refuse() -> None:
        raise PermissionError("not writeable")  # torch_npu prints this error and drops it

    monkeypatch.setattr(ProfPathCreator(), "create_prof_dir", refuse)
    with pytest.raises(BackendError, match="made no recording"):
        make().start(a_window())


@pytest.mark.parametrize("failing", ["_init_profiler", "_start_profiler"])
def test_a_start_that_fails_in_cpp_says_why_and_leaves_nothing_running(
    make: Any, compiled: Compiled, tmp_path: Path, failing: str
) -> None:
    compiled.fails[failing] = "aclprof: 100000"
    with pytest.raises(BackendError, match=f"{failing[1:]}: aclprof: 100000"):
        make().start(a_window())
    gc.collect()  # a profile's destructor stops it once more, and writes into the working directory
    assert compiled.calls[-1] == "_finalize_profiler()"
    assert compiled.calls.count("_finalize_profiler()") == 1
    assert not list(tmp_path.rglob("*_ascend_pt"))
    compiled.fails.clear()
    assert record(make())


@pytest.mark.parametrize("schedule", [None, {"active": 2}], ids=["whole", "cut"])
def test_a_stop_that_fails_in_cpp_is_finished_and_not_made_once_more_by_the_destructor(
    make: Any, compiled: Compiled, schedule: object
) -> None:
    backend = make(schedule=schedule)
    backend.start(a_window())
    mark(backend)
    compiled.fails["_stop_profiler"] = "aclprofStop: 100000"
    [artifact] = backend.stop()
    assert "aclprofStop: 100000" in str(artifact.lacking)
    artifact.discard()
    gc.collect()
    assert compiled.calls.count("_stop_profiler()") == compiled.calls.count("_finalize_profiler()") == 1
    compiled.fails.clear()
    assert record(make())


def test_a_recording_that_was_open_before_anything_of_ours_is_known_by_torch_npus_own_mark(make: Any) -> None:
    from torch_npu.profiler._profiler_path_creator import ProfPathCreator

    ProfPathCreator().is_prof_inited = True
    with pytest.raises(ProfilerBusyError, match="not stepscope's"):
        make().start(a_window())
    ProfPathCreator().is_prof_inited = False


def test_a_process_is_hooked_once(make: Any) -> None:
    from torch_npu.profiler import profiler_interface

    make().prepare()
    hooked = profiler_interface._init_profiler
    make().prepare()
    assert profiler_interface._init_profiler is hooked


def test_a_recording_of_others_is_known_without_torch_npus_own_mark_of_it(
    make: Any, compiled: Compiled, their_profile: Any
) -> None:
    from torch_npu.profiler._profiler_path_creator import ProfPathCreator

    make().prepare()
    theirs = their_profile()
    theirs.start()
    ProfPathCreator().is_prof_inited = False  # as the end of another recording would leave it
    with pytest.raises(ProfilerBusyError, match="not stepscope's"):
        make().start(a_window())
    theirs.stop()


def test_a_device_that_does_not_synchronize_does_not_keep_the_recording(
    make: Any, compiled: Compiled, tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    compiled.fails["synchronize"] = "the device is lost"
    [artifact] = backend.stop()
    assert "not synchronize" in str(artifact.lacking)
    assert compiled.calls.count("_stop_profiler()") == compiled.calls.count("_finalize_profiler()") == 1
    compiled.fails.clear()
    written([artifact], tmp_path / "out")
    assert record(make())


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (["_finalize_profiler"], "not finish.*: lost"),
        (["synchronize", "_stop_profiler", "_finalize_profiler"], "stop_profiler: lost"),
    ],
)
def test_an_end_that_fails_leaves_the_process_free(
    make: Any, compiled: Compiled, tmp_path: Path, failing: list[str], message: str
) -> None:
    backend = make()
    backend.start(a_window())
    compiled.fails = dict.fromkeys(failing, "lost")
    with pytest.raises(BackendError, match=message):
        backend.stop()
    assert not list(tmp_path.rglob("*_ascend_pt"))
    compiled.fails.clear()
    [artifact] = record(make())
    artifact.discard()


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def look(*_: object, **__: object) -> None:
        raise OSError("disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(_disk, "look", look)
        yield


@pytest.mark.usefixtures("no_disk")
def test_a_window_that_cannot_be_ended_says_so_and_leaves_the_process_free(make: Any) -> None:
    backend = make()
    backend.start(a_window())
    with pytest.raises(BackendError, match="disk is gone"):
        backend.stop()
    assert PROCESS_LOCK.holder is None


@pytest.mark.usefixtures("no_disk")
def test_a_mini_batch_that_cannot_be_ended_ends_the_window_and_not_the_training(make: Any) -> None:
    backend = make(schedule={"repeat": 0})
    backend.start(a_window())
    backend.advance()
    assert PROCESS_LOCK.holder is None
    backend.advance()
    with pytest.raises(BackendError, match="1 mini-batches: disk"):
        backend.stop()


def test_a_recording_without_any_data_is_an_error_at_stop(make: Any, compiled: Compiled) -> None:
    compiled.no_prof = True
    backend = make(contents=["npu"])
    backend.start(a_window())
    with pytest.raises(BackendError, match=r"PROF_\* nor FRAMEWORK"):
        backend.stop()
    assert backend.stop() == []


def test_a_range_that_is_open_at_the_stop_is_closed_before_it(make: Any, compiled: Compiled) -> None:
    backend = make()
    backend.start(a_window())
    with backend.range(SpanInfo(stage="update", role="actor", span=1, is_async=False)):
        [artifact] = backend.stop()
        calls = [call.split("(")[0] for call in compiled.calls]
    artifact.discard()
    assert calls.index("synchronize") < calls.index("_range_end") < calls.index("_stop_profiler")
    assert [call.split("(")[0] for call in compiled.calls].count("_range_end") == calls.count("_range_end")


@pytest.mark.parametrize("variable", ["PROFILING_MODE", "PROFILER_SAMPLECONFIG"])
def test_a_process_that_msprof_profiles_is_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    backend = make()
    backend.prepare()
    monkeypatch.setenv(variable, "dynamic")
    with pytest.raises(BackendError, match=f"Fix: unset {variable}"):
        make().check()
    with pytest.raises(BackendError, match=variable):
        backend.start(a_window())
    monkeypatch.setenv(variable, "")
    make().check()


# Threads and devices.


def test_a_window_of_another_thread_is_on_the_device_of_that_thread(make: Any, compiled: Compiled) -> None:
    compiled.device = 1
    backend = make()
    try:
        in_thread(lambda: backend.start(a_window()) or True)
    finally:
        compiled.device = 0
    [artifact] = backend.stop()
    calls = [call for call in compiled.calls if call != "_lazy_init()"]
    assert calls[0] == "set_device(1)"
    artifact.discard()


@pytest.fixture
def joins() -> bool:
    """Return whether this torch_npu can record a further thread on request."""
    from torch_npu.profiler import profile

    return hasattr(profile, "enable_profiler_in_child_thread")


def test_a_thread_that_opens_a_window_has_its_operators_in_it_or_is_told_why_not(
    make: Any, compiled: Compiled, joins: bool
) -> None:
    seen: list[bool] = []

    def work() -> list[PendingArtifact]:
        backend = make(contents=["npu", "cpu", "shapes"])
        backend.start(a_window())
        seen.append(compiled.thread_is_recorded())
        taken: list[PendingArtifact] = backend.stop()
        seen.append(compiled.thread_is_recorded())
        return taken

    [artifact] = in_thread(work)
    artifact.discard()
    assert seen == [joins, False]
    assert artifact.options["operators_of"] == ("test-thread" if joins else None)
    assert ("npu.contents.cpu" in artifact.ignored) != joins
    if joins:
        [asked] = [call for call in compiled.calls if call.startswith("_enable_profiler_in_child_thread")]
        assert "[record_shapes]" in asked


def test_a_thread_leaves_a_window_that_another_thread_has_stopped_once_it_can(
    make: Any, compiled: Compiled, joins: bool
) -> None:
    backend = make()

    def work() -> list[bool]:
        backend.start(a_window())
        in_thread(backend.stop)[0].discard()
        seen = [compiled.thread_is_recorded()]
        for artifact in record(backend):
            artifact.discard()
        return [*seen, compiled.thread_is_recorded()]

    assert in_thread(work) == [joins, False]


def test_a_thread_is_not_recorded_any_more_when_other_code_profiles_it(make: Any, compiled: Compiled) -> None:
    import torch

    backend = make()

    def work() -> int:
        backend.start(a_window())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            assert not compiled.thread_is_recorded()
            torch.ones(2) + 1
        return len(theirs.events())

    assert in_thread(work) > 0
    [artifact] = backend.stop()
    artifact.discard()


def test_the_child_of_a_fork_leaves_the_parents_profile_and_thread_alone(make: Any) -> None:
    backend = make()

    def work() -> bool:
        backend.start(a_window())
        profile = backend._held.window._profile

        def left_alone() -> bool:
            recorded = getattr(_operators._here, "joined", False)
            return profile.stopped and profile in _window._parents and not recorded

        return in_child(left_alone)

    assert in_thread(work)
    [artifact] = backend.stop()
    artifact.discard()


def test_a_window_without_operators_asks_for_none(make: Any, compiled: Compiled) -> None:
    backend = make(contents=["npu"])
    in_thread(lambda: backend.start(a_window()) or True)
    [artifact] = backend.stop()
    artifact.discard()
    assert artifact.options["operators_of"] is None
    assert not any("child_thread" in call for call in compiled.calls)


# Mini-batches.


def test_each_cycle_of_a_schedule_is_a_recording_and_a_cut_one_says_so(make: Any, tmp_path: Path) -> None:
    backend = make(schedule={"active": 2, "repeat": 0})
    backend.start(a_window())
    for _ in range(3):
        mark(backend)
        backend.advance()
    first, second = backend.stop()
    assert (first.truncated, first.options["cycle"]) == (None, 0)
    assert "1 of 2 active" in str(second.truncated)
    assert [len(messages(path)) for path in written([first, second], tmp_path / "out")] == [2, 1]


def test_a_window_that_ends_late_is_waited_for_and_still_gives_every_cycle(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Late, "wait", lambda _, patience_s: waited.append(patience_s))
    backend = make(schedule={"repeat": 0})
    backend.start(a_window())
    backend.advance()
    window = backend._held.window
    late = backend._late_artifact(window, Late(window, window.thread.submit(window.end)))
    [folder] = written([late], tmp_path / "out")
    assert waited == [ProfileConfig().budget.export_seconds]
    assert (folder / "profiler_info.json").exists()
    assert (folder / "cycle1_ascend_pt" / "profiler_info.json").exists()
    assert backend.stop() == []


@pytest.mark.parametrize(
    ("schedule", "message"),
    [({"skip_first": 5}, "mini-batch 5 .* 1 times"), ({"warmup": 2}, "mini-batch 2 on")],
)
def test_a_window_that_ends_before_its_schedule_records_leaves_nothing_and_says_so(
    make: Any, tmp_path: Path, schedule: object, message: str
) -> None:
    backend = make(schedule=schedule)
    backend.start(a_window())
    backend.advance()
    with pytest.raises(BackendError, match=message):
        backend.stop()
    assert not list((tmp_path / "run").glob("step_*/*"))


# Other recordings in the process.


def test_a_profiler_the_user_has_made_writes_where_the_user_said(
    make: Any, their_profile: Any, tmp_path: Path
) -> None:
    theirs = their_profile()
    [artifact] = record(make())
    theirs.start()
    theirs.stop()
    assert len(list((tmp_path / "theirs").glob("mine_*/*_info.json"))) == 1
    artifact.discard()


def test_a_profiler_the_user_makes_during_a_window_writes_where_the_user_said_too(
    make: Any, their_profile: Any, tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    mark(backend)
    theirs = their_profile()
    [folder] = written(backend.stop(), tmp_path / "out")
    assert messages(folder) == ["actor.update"]
    theirs.start()
    theirs.stop()
    assert len(list((tmp_path / "theirs").glob("mine_*/*_info.json"))) == 1


def test_a_profiler_of_the_users_that_deletes_what_it_made_in_the_end_does_not_delete_ours(
    make: Any, torch_npu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destructor of their profiler deletes the folder of the last recording, whoever made it."""
    monkeypatch.chdir(tmp_path)
    theirs = torch_npu.profiler._KinetoProfile()
    theirs.start()
    theirs.stop()
    [artifact] = record(make())
    del theirs
    gc.collect()
    [folder] = written([artifact], tmp_path / "out")
    assert messages(folder) == ["actor.update"]
    assert not list(tmp_path.glob("export_only_*/*"))


def test_a_recording_of_the_users_is_left_alone(make: Any, their_profile: Any, tmp_path: Path) -> None:
    backend = make()
    backend.prepare()
    theirs = their_profile()
    theirs.start()
    with pytest.raises(ProfilerBusyError, match="not stepscope's"):
        backend.start(a_window())
    theirs.stop()
    [folder] = (tmp_path / "theirs").glob("*_ascend_pt")
    assert (folder / "FRAMEWORK").is_dir()
    assert record(backend)


def test_a_recording_the_user_starts_ends_ours_and_gets_its_data(
    make: Any, their_profile: Any, tmp_path: Path
) -> None:
    backend = make()
    backend.start(a_window())
    mark(backend)
    theirs = their_profile()
    theirs.start()
    theirs.add_metadata("mine", "yes")
    theirs.stop()
    [artifact] = backend.stop()
    assert " torch_npu.profiler" in str(artifact.truncated)
    [folder] = written([artifact], tmp_path / "out")
    assert messages(folder) == ["actor.update"]
    [theirs_folder] = (tmp_path / "theirs").glob("*_ascend_pt")
    assert (theirs_folder / "FRAMEWORK").is_dir()
    assert "mine" in (theirs_folder / "profiler_metadata.json").read_text()


def test_torch_profiler_first_and_then_this_is_refused(make: Any) -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        with pytest.raises(ProfilerBusyError, match=r"a torch\.profiler session"):
            make().start(a_window())
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in theirs.events())


def test_torch_profiler_after_this_ends_ours_and_works(make: Any) -> None:
    import torch

    backend = make()
    backend.start(a_window())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in theirs.events())
    [artifact] = backend.stop()
    assert " torch.profiler on" in str(artifact.truncated)
    artifact.discard()


# Changes that torch_npu and SGLang make to torch.


def test_a_torch_profiler_that_sglang_has_replaced_is_not_in_the_way(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.profiler, "profile", torch_npu.profiler.profile)
    [artifact] = record(make())
    artifact.discard()
    assert "SGLang replaces it" in str(artifact.options["sglang_profiler"])


def test_the_torch_backend_says_what_sglang_has_done_to_torch(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.profiler, "profile", torch_npu.profiler.profile)
    backend = TorchBackend(ProfileConfig(tool="torch"))
    backend.check()  # the backend does not use `torch.profiler.profile`
    for ours, theirs in (("CPU", "CPU"), ("CUDA", "NPU")):
        kind = getattr(torch_npu.profiler.ProfilerActivity, theirs)
        monkeypatch.setattr(torch.profiler.ProfilerActivity, ours, kind)
    with pytest.raises(BackendError, match=r"ProfilerActivity\.CPU.*: npu"):
        TorchBackend(ProfileConfig(tool="torch")).check()
    [artifact] = record(make())
    artifact.discard()


def test_hooks_of_torch_npu_are_named_in_the_sidecar(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils.data import DataLoader

    [artifact] = record(make())
    artifact.discard()
    assert artifact.options[PATCHED] is None
    try:
        from torch_npu.profiler import _add_mstx_patch
    except ImportError:
        assert FAMILY == "A"
        return
    for owner, name in ((DataLoader, "__iter__"), (torch.serialization, "save")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    _add_mstx_patch._apply_mstx_patch()
    [artifact] = record(make())
    artifact.discard()
    assert str(artifact.options[PATCHED]).split(",") == ["DataLoader.__iter__", "torch.serialization.save"]


def test_nothing_is_left_of_it_that_another_capture_could_meet(stepscope_idle: None) -> None:
    assert stepscope.flush() == []


@pytest.fixture
def stepscope_idle() -> None:
    gc.collect()
