"""Steps of a loop that nobody edits: which calls open and close captures, and with which number."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable, manifest_of, part_of, spans_alone
from stepscope import ProfileConfig, capture, configure
from stepscope._recording.instrument import step_boundaries
from stepscope.files.layout import RunLayout
from stepscope.testing.fake_backend import FakeBackend
from stepscope.testing.recorded_run import finished_spans

FRAMEWORK = """
class State:
    global_step = 10

class Loop:
    def __init__(self, broken_at=None):
        self.state = State()
        self.broken_at = broken_at

    def fit(self, steps):
        for _ in range(steps):
            self.before(self.state)
            self.update()
            self.state.global_step += 1
            self.after()
            self.log()

    def before(self, state): pass
    def after(self): pass
    def log(self): return self.state.global_step
    def update(self, kind="actor"):
        if self.state.global_step == self.broken_at:
            raise ValueError("theirs")
        return self.state.global_step

    def train_step(self, batch, step=None):
        return self.update(**batch)

    async def train_step_async(self, step):
        return self.update()

    def samples(self):
        yield self.update()
"""

Build = Callable[..., Any]
Spans = Callable[[], dict[int, list[str]]]


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Provide the framework, under a name of the test's own, not yet imported."""
    name = "loop_" + request.node.name.partition("[")[0]
    with importable(tmp_path / "modules", **{name: FRAMEWORK}):
        yield name


@pytest.fixture
def framework(module: str, tmp_path: Path) -> Build:
    """Configure these entries, import the framework, and return its class."""

    def build(*entries: dict[str, object], steps: str = "every:1") -> Any:
        update: Entry = {"name": "Loop.update", "role": "actor"}
        listed = [{"module": module, **entry} for entry in (*entries, update)]
        configure(spans_alone(tmp_path / "run", steps=steps, instrument=listed))
        return importlib.import_module(module).Loop

    return build


@pytest.fixture
def spans(tmp_path: Path) -> Spans:
    def read() -> dict[int, list[str]]:
        run = tmp_path / "run"
        return {step: [span.stage for span in finished_spans(run, step)] for step in RunLayout(run).steps()}

    return read


Entry = dict[str, object]
Steps = dict[int, list[str]]
AROUND: Entry = {"name": "Loop.train_step", "step": "around"}
BEGIN: Entry = {"name": "Loop.before", "step": "begin", "number": "state.global_step"}
LOG: Entry = {"name": "Loop.log", "role": "trainer"}
END: Entry = {"name": "Loop.after", "step": "end"}
AT_THE_END: Entry = {"name": "Loop.fit", "step": "end"}


def trained(count: int) -> Callable[[Any], object]:
    return lambda loop: [loop.train_step({}, step=7) for _ in range(count)]


BOUNDARIES: dict[str, tuple[list[Entry], str, Callable[[Any], object], Steps]] = {
    "a call around is a step, counted from 0": (
        [AROUND], "every:1", lambda loop: (trained(2)(loop), loop.update()), {0: ["update"], 1: ["update"]}
    ),
    "steps that are not selected are counted": ([AROUND], "2", trained(4), {2: ["update"]}),
    "a call at either end is also a span of the step": (
        [BEGIN, {**LOG, "name": "Loop.before"}, END, {**LOG, "name": "Loop.after"}],
        "every:1", lambda loop: loop.fit(1), {10: ["before", "update", "after"]},
    ),
    "a path says the number": ([{**AROUND, "number": "step"}], "every:1", trained(1), {7: ["update"]}),
    "a path and a sum": ([{**AROUND, "number": "step+1"}], "every:1", trained(1), {8: ["update"]}),
    "a path from self": (
        [{**AROUND, "number": "self.state.global_step"}], "every:1", trained(1), {10: ["update"]}
    ),
    "keys of mappings are part of a path": (
        [{**AROUND, "where": {"batch.kind": "critic"}}], "every:1",
        lambda loop: [loop.train_step({"kind": kind}) for kind in ("critic", "actor")], {0: ["update"]},
    ),
    "begin and end bound a step": (
        [BEGIN, END, LOG], "every:1", lambda loop: loop.fit(2), {10: ["update"], 11: ["update"]}
    ),
    "a step without an end lasts until the next": (
        [BEGIN, AT_THE_END, LOG], "every:1", lambda loop: loop.fit(2),
        {10: ["update", "log"], 11: ["update", "log"]},
    ),
    "next ends a step and begins another": (
        [{"name": "Loop.before", "step": "begin"},
         {"name": "Loop.log", "step": "next", "number": "self.state.global_step"}, AT_THE_END],
        "0:12", lambda loop: loop.fit(3), {0: ["update"], 11: ["update"]},
    ),
    "a coroutine can be a step": (
        [{"name": "Loop.train_step_async", "step": "around", "number": "step"}], "every:1",
        lambda loop: asyncio.run(loop.train_step_async(3)), {3: ["update"]},
    ),
    "a step inside a step is a part of it": (
        [{"name": "Loop.fit", "step": "around"}, {"name": "Loop.before", "step": "around"}], "every:1",
        lambda loop: loop.fit(2), {0: ["update", "update"]},
    ),
    "a function can be a span and a boundary": (
        [{"name": "Loop.log", "step": "next"}, LOG], "every:1", lambda loop: (loop.log(), loop.log()),
        {0: ["log"], 1: []},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "steps", "act", "expected"), BOUNDARIES.values(), ids=BOUNDARIES)
def test_boundaries_bound_the_steps_of_a_loop(
    entries: list[Entry], steps: str, act: Callable[[Any], object], expected: Steps,
    framework: Build, spans: Spans,
) -> None:  # fmt: skip
    act(framework(*entries, steps=steps)())
    assert spans() == expected
    assert step_boundaries._step is None or AT_THE_END not in entries


@pytest.mark.usefixtures("in_production")
def test_a_step_whose_workers_cannot_be_read_costs_no_later_step(
    framework: Build, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = framework(BEGIN, AT_THE_END)()
    answers = iter([None, RuntimeError("not built yet"), None, None])

    def workers(_: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(step_boundaries.Call, "_workers", workers)
    loop.fit(4)
    assert list(spans()) == [10, 12, 13]


def test_beginning_the_step_one_is_in_changes_nothing(framework: Build, spans: Spans) -> None:
    loop = framework(BEGIN)()
    loop.before(loop.state)
    open_one = step_boundaries._step
    loop.before(loop.state)
    assert step_boundaries._step is open_one
    loop.state.global_step += 1
    loop.before(loop.state)
    assert sorted(spans()) == [10, 11]


def test_an_exception_of_the_loop_passes_and_ends_the_step(
    framework: Build, spans: Spans, tmp_path: Path
) -> None:
    loop = framework(BEGIN, END, AT_THE_END)(broken_at=11)
    with pytest.raises(ValueError, match="theirs"):
        loop.fit(3)
    assert spans() == {10: ["update"], 11: ["update"]}
    assert part_of(RunLayout(tmp_path / "run").step(11)).error == "ValueError: theirs"


def test_a_boundary_inside_a_call_around_is_a_part_of_its_step(framework: Build, spans: Spans) -> None:
    around = {"name": "Loop.fit", "step": "around"}
    loop = framework(around, BEGIN, END, {"name": "Loop.log", "step": "next"})()
    loop.fit(2)
    assert spans() == {0: ["update", "update"]}
    loop.before(loop.state)  # of a trainer that has no call around its steps
    loop.update()
    loop.after()
    assert spans()[12] == ["update"]


def test_a_capture_of_the_users_own_is_left_alone(framework: Build, spans: Spans) -> None:
    loop = framework(AROUND)()
    with capture(5):
        loop.train_step({})
    assert spans() == {5: ["update"]}


@pytest.mark.usefixtures("in_production")
def test_a_number_that_is_none_is_logged_and_the_loop_goes_on(
    framework: Build, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    loop = framework({**AROUND, "number": "step"})()
    assert loop.train_step({}) == 10
    assert "step is None" in caplog.text
    assert spans() == {}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({**AROUND, "number": "stpe"}, "its arguments: self, batch, step"),
        ({**AROUND, "workers": {"actor": "wg"}}, "wg"),
        ({"name": "Loop.samples", "step": "around"}, "is a generator"),
        ({"name": "Loop.samples", "role": "env", "where": {"self.a": 1}}, "is a generator"),
    ],
)
@pytest.mark.usefixtures("in_production")
def test_what_cannot_be_a_boundary_is_said_at_the_import(
    framework: Build, entry: Entry, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert framework(entry)().update() == 10
    assert expected in caplog.text


def test_calls_are_told_apart_by_their_arguments(framework: Build, tmp_path: Path) -> None:
    same = {"name": "Loop.before", "role": "ref", "same": {"state": "self.state"}}
    loop = framework(same, {"name": "Loop.before", "role": "actor"})()
    with capture(0):
        loop.before(loop.state)
        loop.before(object())
    assert [span.role for span in finished_spans(tmp_path / "run")] == ["ref", "actor"]


def test_a_forked_child_leaves_the_step_to_its_parent(framework: Build, spans: Spans) -> None:
    loop = framework({"name": "Loop.before", "step": "begin"}, END)()
    loop.before(loop.state)
    child = os.fork()
    if child == 0:
        loop.after()
        os._exit(0)
    os.waitpid(child, 0)
    loop.update()
    loop.after()
    assert spans() == {0: ["update"]}


class Warmed(FakeBackend):
    """Counts how often it was started for nothing."""

    prepared = 0

    def prepare(self) -> None:
        self.prepared += 1


@pytest.mark.parametrize("steps", ["0", "90"])
def test_the_profiler_is_started_for_nothing_once_before_the_first_step(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    backend = Warmed()
    for user in ("stepscope._recording.fanout.worker_side", "stepscope._recording.session.session"):
        monkeypatch.setattr(f"{user}.load_backend", lambda tool, config: backend)
    monkeypatch.setattr("stepscope._recording.fanout.worker_side.library_loaded", lambda tool: True)
    monkeypatch.setattr("stepscope._recording.session.session.library_loaded", lambda tool: False)
    monkeypatch.setattr("stepscope._recording.process.identity._prepared_in", 0)
    seen = []
    entry = {"module": module, "name": "Loop.train_step", "step": "around"}
    configure(ProfileConfig(save_path=tmp_path / "run", steps=steps, instrument=[entry]))
    cls = importlib.import_module(module).Loop
    monkeypatch.setattr(cls, "update", lambda self: seen.append(backend.prepared))
    for _ in range(2):
        cls().train_step({})
    assert seen == [1, 1]


def test_the_manifest_says_that_an_entry_opened_the_capture(framework: Build, tmp_path: Path) -> None:
    framework(AROUND)().train_step({})
    with capture(1):
        pass
    steps = RunLayout(tmp_path / "run").steps().values()
    assert [manifest_of(step).opened_by for step in steps] == ["instrument", "program"]
