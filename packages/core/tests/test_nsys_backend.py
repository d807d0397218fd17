"""The nsys backend without nsys: errors, and words that start it. `real/test_nsys.py` has a real nsys."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope import ProfileConfig, capture, prepare
from stepscope.backends import nsys
from stepscope.backends.nsys import NsysBackend, command, launch_options, runtime_env
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.errors import BackendError, CaptureError, ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.sidecar import NSYS_RANGES, ProcessInfo


def test_the_fix_is_whole_in_what_prepare_raises_and_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    config = ProfileConfig(save_path=tmp_path / "run", steps=[1], tool="nsys")
    with pytest.raises(CaptureError, match=r"Fix: .* train\.py`$"):
        prepare(config=config)
    with capture(1, config=config):
        pass
    manifest = fold(read_parts(RunLayout(tmp_path / "run").step(1))[0])
    reasons = [item.reason for part in manifest.processes for item in part.expected if item.kind == "trace"]
    assert [str(reason).endswith(" python train.py`") for reason in reasons] == [True]


def test_a_process_that_nsys_did_not_start_is_told_how_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    with pytest.raises(BackendError, match=r"runtime_env\(.*--trace="):
        NsysBackend(ProfileConfig()).check()


def test_each_command_is_a_session_of_its_own() -> None:
    config = ProfileConfig(nsys={"trace": ["cuda", "osrt"], "extra": {"cuda-memory-usage": "true"}})
    first, second = command(config), command(config)
    assert first[:-1] == second[:-1]
    assert first[:-1] == [
        "nsys", "launch", "--trace=cuda,osrt", "--wait=primary", "--cuda-memory-usage=true"
    ]  # fmt: skip
    assert first[-1].startswith("--session-new=")
    assert first[-1] != second[-1]


def test_ray_starts_this_python_under_nsys_in_a_session_of_the_actor() -> None:
    started = runtime_env(ProfileConfig())
    assert started == {
        "py_executable": "nsys launch --trace=cuda,nvtx --wait=primary --session-new=stepscope$$ "
        + sys.executable
    }


def test_options_of_nsys_start_are_not_given_to_launch() -> None:
    extra = {"gpu-metrics-device": "all", "sample": "process-tree", "cuda-flush-interval": "100"}
    options = launch_options(ProfileConfig(nsys={"extra": extra}))
    assert options == {"trace": "cuda,nvtx", "wait": "primary", "cuda-flush-interval": "100"}


def test_the_graphs_and_the_workers_of_an_engine_are_recorded() -> None:
    started = runtime_env(ProfileConfig(), engine=True)
    assert "--cuda-graph-trace=node --trace-fork-before-exec=true" in started["py_executable"]
    assert started["env_vars"] == {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}


def test_an_unknown_thing_to_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nsys\.trace .*'cuad'"):
        ProfileConfig(nsys={"trace": ["cuad"]})


@pytest.fixture
def _no_markers_are_known() -> Iterator[None]:
    nsys._markers.cache_clear()
    yield
    nsys._markers.cache_clear()


@pytest.mark.usefixtures("_no_markers_are_known")
def test_without_nvtx_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "'stepscope[nsys]'" in str(nsys.markers())


@pytest.mark.usefixtures("_no_markers_are_known")
def test_a_torch_that_is_imported_later_gives_the_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert isinstance(nsys.markers(), str)
    nvtx = SimpleNamespace(range_start=lambda name: 1, range_end=lambda number: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(nvtx=nvtx)))
    assert isinstance(nsys.markers(), nsys.Markers)


@pytest.fixture
def idle_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program in the place of nsys that takes every command, in a session."""
    program = tmp_path / "nsys"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    for name in nsys._INJECTED[1:]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(nsys.SESSION, "profile-1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return program


WINDOW = Window(
    step=1,
    process=ProcessInfo(role="actor", rank=0, world_size=1, host="host-a", pid=1),
    stage=None,
    index=0,
)


def test_a_window_that_does_not_stop_leaves_no_folder(tmp_path: Path, idle_nsys: Path) -> None:
    """nsys can be started, and is gone when the window ends."""
    backend = NsysBackend(ProfileConfig(nsys={"trace": ["cuda"]}))
    backend.start(WINDOW)
    (folder,) = tmp_path.glob("stepscope-nsys-*")
    idle_nsys.unlink()
    with pytest.raises((BackendError, OSError)):
        backend.stop()
    assert not folder.exists()


def backend_with_markers(monkeypatch: pytest.MonkeyPatch) -> NsysBackend:
    made = nsys.Markers(lambda name: name, lambda number: None)
    monkeypatch.setattr(nsys, "markers", lambda: made)
    return NsysBackend(ProfileConfig(nsys={"trace": ["nvtx"]}))


def recorded(backend: NsysBackend, spans: int) -> PendingArtifact:
    """Record a window with as many spans, and return its artifact, discarded."""
    backend.start(WINDOW)
    for _ in range(spans):
        with backend.range(SpanInfo(role="actor", stage="update", span=1, is_async=False)):
            pass
    (artifact,) = backend.stop()
    assert artifact.discard is not None
    artifact.discard()
    return artifact


@pytest.mark.usefixtures("idle_nsys")
@pytest.mark.parametrize("spans", [0, 1])
def test_a_report_says_whether_spans_made_ranges(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_with_markers(monkeypatch)
    for count in (spans, 0):  # a window forgets those of the window before
        assert recorded(backend, count).options[NSYS_RANGES] == bool(count)


@pytest.mark.usefixtures("idle_nsys")
@pytest.mark.parametrize(("late_s", "spans", "partial"), [(0.0, 1, True), (0.0, 0, False), (60.0, 1, False)])
def test_a_start_that_the_process_did_not_answer_in_time_is_told(
    late_s: float, spans: int, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys, "LATE_S", late_s)
    artifact = recorded(backend_with_markers(monkeypatch), spans)
    assert ("nsys start took" in str(artifact.lacking)) == partial
