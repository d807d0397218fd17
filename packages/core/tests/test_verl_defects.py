"""Defects found by reading verl's DistProfiler, each as a test that stepscope does not have it.

V1 to V16 are our numbers for them. V3, V8 and V9 (configuration) stand in test_config_values.py and
test_config_page.py; V10 in test_engine_actor_call.py; V11 (nsys reports moved before they are complete) in
test_nsys_backend.py; V14 (two Ascend formats in one step) in test_reader.py of the NPU package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.core.tests.runs import manifest_of, outcomes, step_of
from stepscope import ProfileConfig, capture, profile_step, span
from stepscope._recording.session import selection, session
from stepscope._recording.spans import slot
from stepscope.backends import Backend, load_backend
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.engines import EngineCapture
from stepscope.errors import BackendError, ConfigError
from stepscope.testing.fake_backend import FakeBackend
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    made = FakeBackend()
    monkeypatch.setattr(session, "load_backend", lambda name, config: made)
    monkeypatch.setattr(selection, "LIBRARY", {})
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    yield made
    assert PROCESS_LOCK.holder is None


def config_in(folder: Path, **settings: object) -> ProfileConfig:
    return ProfileConfig(save_path=str(folder), steps=[2, 3], **settings)  # type: ignore[arg-type]  # forms


@pytest.mark.parametrize("tool", ["torch", "cuda_memory"])
def test_v1_every_backend_has_all_that_is_called(tool: str) -> None:
    made = load_backend(tool, ProfileConfig())
    assert isinstance(made, Backend)


def test_v2_a_leaked_start_does_not_disable_later_ones(tmp_path: Path, backend: FakeBackend) -> None:
    config = config_in(tmp_path)
    backend.fails_to_start = True
    with capture(2, config=config):
        pass
    backend.fails_to_start = False
    with capture(3, config=config) as cap:
        pass
    cap.result.raise_for_missing()
    assert outcomes(step_of(config, 3))["fake trace"].state == "ok"


@pytest.mark.parametrize("mode", ["continuous", "discrete"])
def test_v4_an_exception_leaks_neither_range_nor_profiler(
    tmp_path: Path, backend: FakeBackend, mode: str
) -> None:
    @profile_step(role="actor")
    def update() -> None:
        raise ValueError("mine")

    config = config_in(tmp_path, mode=mode)
    with capture(2, config=config) as cap:
        with pytest.raises(ValueError, match="mine"):
            update()
        assert (PROCESS_LOCK.holder is None) == (mode == "discrete")
        with span("after"):
            pass
    cap.result.raise_for_missing()


def test_v5_a_step_that_raises_stops_the_profiler(tmp_path: Path, backend: FakeBackend) -> None:
    config = config_in(tmp_path)
    with pytest.raises(ValueError, match="mine"), capture(2, config=config):
        raise ValueError("mine")
    assert PROCESS_LOCK.holder is None
    assert slot.session() is None


def test_v6_a_profiler_that_fails_is_in_the_manifest(tmp_path: Path, backend: FakeBackend) -> None:
    config = config_in(tmp_path)
    backend.fails_to_start = True
    with capture(2, config=config):
        pass
    trace = outcomes(step_of(config, 2))["fake trace"]
    assert (trace.state, str(trace.reason).partition(":")[0]) == ("failed", "BackendError")
    assert outcomes(step_of(config, 2))["spans"].state == "ok"


def test_v7_a_backend_that_lacks_a_method_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halfway:
        name = "halfway"

        def start(self, window: object) -> None: ...

    class Point:
        name = "halfway"

        def load(self) -> Callable[[ProfileConfig], object]:
            return lambda config: Halfway()

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    with pytest.raises(BackendError, match="lacks advance, check"):
        load_backend("halfway", ProfileConfig())


def test_v12_a_capture_leaves_the_environment_as_it_was(tmp_path: Path, backend: FakeBackend) -> None:
    before = dict(os.environ)
    with capture(2, config=config_in(tmp_path), engines=[FakeEngineProfiler(FakeEngine())]):
        assert dict(os.environ) == before
    assert dict(os.environ) == before


def test_v15_a_window_of_engine_iterations_is_called_that() -> None:
    rollout = {"engine": {"iterations": {"start": 2, "count": 4}}}
    config = ProfileConfig(roles={"rollout": rollout})
    assert config.roles["rollout"].engine.iterations.count == 4
    assert "iterations" in EngineCapture.__struct_fields__
    with pytest.raises(ConfigError, match="token"):
        ProfileConfig.from_mapping({"roles": {"rollout": {"engine": {"token_start": 2}}}})


@pytest.mark.parametrize("mode", ["continuous", "discrete"])
async def test_v16_engines_are_recorded_in_both_modes(
    tmp_path: Path, backend: FakeBackend, mode: str
) -> None:
    config = config_in(tmp_path, mode=mode)
    async with capture(2, config=config, engines=[FakeEngineProfiler(FakeEngine())]):
        pass
    assert outcomes(step_of(config, 2))["replica 0"].state == "ok"


async def test_v16_what_is_not_recorded_says_why(tmp_path: Path, backend: FakeBackend) -> None:
    config = config_in(tmp_path, roles={"actor": {"ranks": "all"}})
    async with capture(2, config=config, engines=[FakeEngineProfiler(FakeEngine())]):
        pass
    assert "role 'rollout'" in str(outcomes(step_of(config, 2))["replica 0"].reason)


def test_v13_what_another_nodes_disk_keeps_is_missing_by_name(tmp_path: Path, backend: FakeBackend) -> None:
    config = config_in(tmp_path)
    with capture(2, config=config) as cap:
        open_session = slot.active
        assert isinstance(open_session, session.Session)
        open_session.manifest_part.update(began={"actor_rank3_node1_pid7": "actor[3] Actor(Worker, 0123)"})
    manifest = manifest_of(cap.result)
    assert manifest.state == "missing"
    (line,) = [line for line in manifest.problems() if "actor[3]" in line]
    assert "does not share" in line
