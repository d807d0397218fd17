"""The profiler's windows in a capture: continuous and discrete, and what becomes of a profiler's failures."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

import stepscope
from packages.core.tests.runs import outcomes, step_of
from stepscope import ProfileConfig, capture, prepare, profile_step, span
from stepscope._recording.fanout import worker_side
from stepscope._recording.session import selection, session
from stepscope._recording.spans import scopes
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.config import RoleConfig
from stepscope.errors import BackendError
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.manifest import Expectation
from stepscope.files.sidecar import Sidecar
from stepscope.testing.fake_backend import FakeBackend

Configure: TypeAlias = "Callable[..., ProfileConfig]"


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    made = FakeBackend()
    monkeypatch.setattr(session, "load_backend", lambda name, config: made)
    monkeypatch.setattr(selection, "LIBRARY", {})
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    yield made
    assert PROCESS_LOCK.holder is None


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    def make(**settings: object) -> ProfileConfig:
        return ProfileConfig(save_path=str(tmp_path), steps=[2, 3], **settings)  # type: ignore[arg-type]  # forms

    return make


class Trainer:
    @profile_step(role="actor")
    def update(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("mine")
        self.inner()

    @profile_step(role="actor")
    def inner(self) -> None:
        pass

    @profile_step(role="ref", stage="log_prob")
    async def log_prob(self) -> None:
        await asyncio.sleep(0)

    @profile_step
    def helper(self) -> None:
        pass

    @profile_step(role="actor")
    def items(self) -> Iterator[int]:
        yield from range(9)

    @profile_step(role="actor")
    async def stream(self) -> AsyncIterator[int]:
        for item in range(3):
            yield item


def outcome(config: ProfileConfig, name: str, step: int = 2) -> Expectation:
    return outcomes(step_of(config, step))[name]


def traces(config: ProfileConfig, step: int = 2) -> list[dict[str, object]]:
    paths = sorted(step_of(config, step).traces.rglob("*.json.gz"))
    return [json.loads(gzip.decompress(path.read_bytes())) for path in paths]


def test_continuous_is_one_trace_for_the_whole_capture(configure: Configure) -> None:
    config = configure()
    with capture(2, config=config) as cap:
        Trainer().update()
        with span("reward", role="reward"):
            pass
    cap.result.raise_for_missing()
    (trace,) = traces(config)
    assert trace["stage"] is None
    assert trace["events"] == ["actor.update", "actor.inner", "reward.reward"]


def test_discrete_is_one_trace_for_each_stage(configure: Configure) -> None:
    config = configure(mode="discrete")
    with capture(2, config=config) as cap:
        Trainer().update()
        with span("reward", role="reward"):
            pass
        Trainer().update()
    cap.result.wait()
    assert [(trace["stage"], trace["events"]) for trace in traces(config)] == [
        ("update", ["actor.update", "actor.inner"]),
        ("update", ["actor.update", "actor.inner"]),
    ]
    assert outcome(config, "fake trace of update").state == "ok"
    inner = outcome(config, "fake trace of inner")
    assert inner.state == "skipped"
    assert inner.reason is not None
    assert "trace of update`" in inner.reason


async def test_discrete_traces_a_coroutine_to_its_end(configure: Configure) -> None:
    config = configure(mode="discrete")
    async with capture(2, config=config) as cap:
        await Trainer().log_prob()
    await asyncio.to_thread(cap.result.raise_for_missing)
    (trace,) = traces(config)
    assert trace["stage"] == "log_prob"
    assert trace["events"] == []  # no markers where tasks interleave


async def test_a_generator_has_one_window_and_not_one_per_item(
    configure: Configure,
) -> None:
    config = configure(mode="discrete")
    async with capture(2, config=config) as cap:
        assert [item async for item in Trainer().stream()] == [0, 1, 2]
    await asyncio.to_thread(cap.result.raise_for_missing)
    assert len(traces(config)) == 1


def test_a_generator_older_than_its_capture_has_a_window_in_each_capture_that_resumes_it(
    configure: Configure,
) -> None:
    config = configure(mode="discrete")
    items = Trainer().items()
    next(items)
    for step in (2, 3):
        with capture(step, config=config) as cap:
            next(items)
            next(items)
        cap.result.raise_for_missing()
        assert [(trace["stage"], trace["events"]) for trace in traces(config, step)] == [
            ("items", ["actor.items"])
        ]


def test_each_resumption_of_a_generator_older_than_its_capture_is_a_range_of_its_stage(
    configure: Configure,
) -> None:
    config = configure()
    items = Trainer().items()
    next(items)
    with capture(2, config=config) as cap:
        next(items)
        next(items)
    cap.result.raise_for_missing()
    (trace,) = traces(config)
    assert trace["events"] == ["actor.items", "actor.items"]


def test_discrete_records_the_roles_that_are_selected(configure: Configure) -> None:
    config = configure(mode="discrete", roles={"actor": RoleConfig(ranks=(5,)), "*": RoleConfig()})
    with capture(2, config=config, rank=0):
        Trainer().update()
    reason = str(outcome(config, "fake trace of update").reason)
    assert reason.startswith("rank 0 ")
    assert reason.endswith("roles.actor.ranks [5]")


def test_a_stage_without_a_role_is_selected_by_the_role_of_the_enclosing_span(configure: Configure) -> None:
    config = configure(mode="discrete", roles={"actor": {"ranks": "all"}})
    with capture(2, config=config) as cap, span("epoch", role="actor"):
        Trainer().helper()
    cap.result.raise_for_missing()
    (trace,) = traces(config)
    assert (trace["stage"], trace["events"]) == ("helper", ["actor.helper"])


def test_where_every_role_asks_for_spans_alone_discrete_mode_prepares_no_profiler(
    configure: Configure, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("a profiler was prepared")

    monkeypatch.setattr(backend, "prepare", refuse)
    monkeypatch.setattr(worker_side, "load_backend", lambda name, config: backend)
    config = configure(mode="discrete", roles={"*": {"profiler": "off"}})
    prepare(config=config)
    with capture(2, config=config) as cap:
        Trainer().update()
    cap.result.raise_for_missing()
    assert outcome(config, "torch trace").state == "skipped"


def test_a_profiler_that_cannot_stop_is_failed(
    configure: Configure, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure()
    stop = backend.stop

    def broken() -> None:
        stop()
        raise BackendError("nothing recorded")

    with capture(2, config=config):
        monkeypatch.setattr(backend, "stop", broken)
    assert outcome(config, "fake trace").reason == "BackendError: nothing recorded"


def test_broken_markers_do_not_reach_the_recorded_code(
    configure: Configure, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(backend, "range", broken)
    with capture(2, config=configure()):
        Trainer().update()


def test_at_the_limit_of_a_recursion_no_span_is_left_open(configure: Configure) -> None:
    def down(n: int) -> None:
        Trainer().inner() if n == 0 else down(n - 1)

    with capture(2, config=configure()):
        outside = scopes.current.get()
        for n in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
            with contextlib.suppress(RecursionError):
                down(n)
            assert scopes.current.get() is outside


def test_mini_batches_reach_the_profiler(configure: Configure) -> None:
    config = configure()
    with capture(2, config=config) as cap:
        stepscope.advance()
        stepscope.advance()
    cap.result.wait()
    assert traces(config)[0]["events"] == ["mini-batch", "mini-batch"]
    stepscope.advance()


def test_the_sidecar_says_what_the_name_says_and_more(configure: Configure) -> None:
    config = configure(mode="discrete", roles={"actor": {"ranks": "all"}})
    with capture(2, config=config, rank=3) as cap:
        Trainer().update()
    cap.result.wait()
    layout = RunLayout(config.save_path).step(2)
    (path,) = layout.traces.rglob("*.json.gz")
    assert path.name.startswith("update_rank3_")
    sidecar = msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar)
    assert sidecar.step == 2
    assert (sidecar.artifact.role, sidecar.artifact.stage, sidecar.artifact.rank) == ("actor", "update", 3)
    assert sidecar.artifact.path == str(path.relative_to(layout.root))
    assert sidecar.artifact.size_bytes == path.stat().st_size
    assert sidecar.opened is not None
    assert sidecar.closed is not None
    assert sidecar.opened.mono_ns <= sidecar.closed.mono_ns


def test_stages_in_two_threads_share_one_window_at_a_time(configure: Configure) -> None:
    config = configure(mode="discrete")
    barrier = threading.Barrier(2)

    class Threaded:
        @profile_step(role="actor")
        def work(self) -> None:
            barrier.wait(10)

    with capture(2, config=config) as cap:
        threads = [threading.Thread(target=Threaded().work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    cap.result.raise_for_missing()
    assert len(traces(config)) == 1


def test_a_trace_budget_that_is_used_up_opens_no_further_window(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope._recording.process import exports

    monkeypatch.setattr(exports.Exporter, "bytes_written", lambda self, step: 3 << 20)
    config = configure(budget={"trace_mb": 3})
    with capture(2, config=config):
        pass
    item = outcome(config, "fake trace")
    assert item.state == "missing"
    assert item.reason == item.truncated
    assert re.match(r"budget\.trace_mb: 3 .* 3 ", str(item.reason))


@pytest.mark.parametrize("written", [True, False])
def test_windows_that_the_trace_budget_kept_shut_are_in_the_manifest_and_logged_once(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: bool,
) -> None:
    """The first window's trace is on the disk by then, or on its way."""
    from stepscope._recording.process import exports

    config = configure(
        mode="discrete", budget={"trace_mb": 1}, export={} if written else {"when": "deferred"}
    )

    @profile_step(role="trainer")
    def work() -> None:
        pass

    with capture(2, config=config) as cap:
        work()
        if written:
            exports.exporter().drain(10)
        monkeypatch.setattr(exports.Exporter, "bytes_written", lambda self, step: 1 << 20)
        for _ in range(3):
            work()
    cap.result.wait()
    item = outcome(config, "fake trace of work")
    assert (item.state, item.reason) == ("partial", item.truncated)
    assert str(item.reason).startswith("budget.trace_mb: 1 ")
    assert len(item.artifacts) == 1
    (problem,) = cap.result.problems()
    assert problem.endswith(f"partial: {item.reason}")
    (logged,) = [line for line in caplog.messages if "truncated" in line]
    assert "step 2 " in logged
    assert str(item.reason) in logged


def test_deferred_traces_are_written_when_asked_for(configure: Configure) -> None:
    config = configure(export={"when": "deferred"})
    with capture(2, config=config):
        pass
    assert outcome(config, "fake trace").reason == "not exported yet"
    assert traces(config) == []
    assert stepscope.flush() == []
    assert len(traces(config)) == 1


def test_deferred_traces_are_written_before_the_next_capture_begins(
    configure: Configure,
) -> None:
    config = configure(export={"when": "deferred"})
    with capture(2, config=config):
        pass
    with capture(3, config=config):
        assert len(traces(config, 2)) == 1
    stepscope.flush()


def test_what_the_profiler_costs_is_in_the_manifest(configure: Configure) -> None:
    config = configure()
    with capture(2, config=config) as cap:
        with span("work"):
            pass
    manifest = cap.result.wait()
    assert manifest is not None
    cost = manifest.processes[0].cost
    assert cost.start_ns > 0
    assert cost.stop_ns > 0
    assert cost.spans_ns > 0
    assert cost.export_ns > 0


def test_a_recording_that_lacks_something_is_there_and_partial(
    configure: Configure, backend: FakeBackend
) -> None:
    config = configure()
    backend.lacks = "no device data"
    with capture(2, config=config) as cap:
        Trainer().update()
    cap.result.wait()
    item = outcome(config, "fake trace")
    assert (item.state, item.reason) == ("partial", "no device data")
    assert len(item.artifacts) == 1


def test_a_file_that_fails_after_the_capture_is_logged(
    configure: Configure, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(export={"when": "deferred"})
    backend.lacks = "no device data"
    with capture(2, config=config):
        pass
    assert "no device data" not in caplog.text
    stepscope.flush()
    (line,) = [line for line in caplog.messages if "no device data" in line]
    assert "step 2: fake trace" in line
