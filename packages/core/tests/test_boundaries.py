"""Steps of a loop that nobody edits: which calls open and close captures, and with which number."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope import ProfileConfig, capture, configure
from stepscope._recording.capture import configure as run
from stepscope._recording.instrument import configured, step_boundaries
from stepscope._recording.process import failures
from stepscope.files.manifest.records import Manifest
from stepscope.files.spans import Line, Span
from stepscope.testing.fake_backend import FakeBackend

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

Spans = Callable[[], dict[int, list[str]]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Provide the framework, under a name of the test's own, not yet imported."""
    name = "loop_" + request.node.name.partition("[")[0]
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{name}.py").write_text(FRAMEWORK)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(run, "_configured", None)
    monkeypatch.setattr(step_boundaries, "_next", 0)
    yield name
    step_boundaries.switch(step_boundaries._finish(None))
    configured.apply(ProfileConfig())
    sys.modules.pop(name, None)


@pytest.fixture
def framework(module: str, tmp_path: Path) -> Callable[..., Any]:
    """Configure these entries, import the framework, and return its class."""

    def build(*entries: dict[str, object], steps: str = "every:1") -> Any:
        listed = [{"module": module, **entry} for entry in entries]
        update = {"module": module, "name": "Loop.update", "role": "actor"}
        configure(
            ProfileConfig(
                save_path=tmp_path / "run",
                steps=steps,
                roles={"*": {"profiler": "off"}},
                instrument=[*listed, update],
            )
        )
        return importlib.import_module(module).Loop

    return build


@pytest.fixture
def spans(tmp_path: Path) -> Spans:
    """{step: the stages recorded in it}."""

    def read() -> dict[int, list[str]]:
        stages = {}
        for folder in sorted(tmp_path.glob("run/step_*")):
            lines = [
                line
                for file in folder.glob("spans/*.jsonl")
                for line in msgspec.json.Decoder(Line).decode_lines(file.read_bytes())
            ]
            stages[int(folder.name[-6:])] = [line.stage for line in lines if isinstance(line, Span)]
        return stages

    return read


def test_a_call_around_is_one_step_and_steps_are_counted_from_0(
    framework: Callable[..., Any], spans: Spans
) -> None:
    loop = framework({"name": "Loop.train_step", "step": "around"})()
    assert [loop.train_step({}) for _ in range(2)] == [10, 10]
    loop.update()  # between steps
    assert spans() == {0: ["update"], 1: ["update"]}


def test_a_step_whose_workers_cannot_be_read_costs_no_later_step(
    framework: Callable[..., Any], spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    begin = {"name": "Loop.before", "step": "begin", "number": "state.global_step"}
    loop = framework(begin, {"name": "Loop.fit", "step": "end"})()
    answers = iter([None, RuntimeError("not built yet"), None, None])

    def workers(_: object) -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    monkeypatch.setattr(step_boundaries.Call, "_workers", workers)
    loop.fit(4)
    failures.take()
    assert list(spans()) == [10, 12, 13]


def test_the_steps_that_are_not_selected_are_counted_too(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.train_step", "step": "around"}, steps="2")()
    for _ in range(4):
        loop.train_step({})
    assert spans() == {2: ["update"]}


@pytest.mark.parametrize(("number", "expected"), [("step", 7), ("step+1", 8), ("self.state.global_step", 10)])
def test_a_path_from_the_arguments_says_the_number(
    framework: Callable[..., Any], spans: Spans, number: str, expected: int
) -> None:
    loop = framework({"name": "Loop.train_step", "step": "around", "number": number})()
    loop.train_step({}, step=7)
    assert spans() == {expected: ["update"]}


def test_keys_of_mappings_are_part_of_a_path(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.train_step", "step": "around", "where": {"batch.kind": "critic"}})()
    loop.train_step({"kind": "critic"})
    loop.train_step({"kind": "actor"})
    assert spans() == {0: ["update"]}


def test_begin_and_end_bound_a_step_between_calls(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework(
        {"name": "Loop.before", "step": "begin", "number": "state.global_step"},
        {"name": "Loop.after", "step": "end"},
        {"name": "Loop.log", "role": "trainer"},
    )()
    loop.fit(2)
    assert spans() == {10: ["update"], 11: ["update"]}


def test_a_step_lasts_until_the_next_begins_where_nothing_ends_it(
    framework: Callable[..., Any], spans: Spans
) -> None:
    loop = framework(
        {"name": "Loop.before", "step": "begin", "number": "state.global_step"},
        {"name": "Loop.fit", "step": "end"},
        {"name": "Loop.log", "role": "trainer"},
    )()
    loop.fit(2)
    assert spans() == {10: ["update", "log"], 11: ["update", "log"]}
    assert step_boundaries._step is None


def test_next_ends_a_step_and_begins_another(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework(
        {"name": "Loop.before", "step": "begin"},
        {"name": "Loop.log", "step": "next", "number": "self.state.global_step"},
        {"name": "Loop.fit", "step": "end"},
        steps="0:12",
    )()
    loop.fit(3)
    assert spans() == {0: ["update"], 11: ["update"]}


def test_beginning_the_step_one_is_in_changes_nothing(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.before", "step": "begin", "number": "state.global_step"})()
    loop.before(loop.state)
    open_one = step_boundaries._step
    loop.before(loop.state)
    assert step_boundaries._step is open_one
    loop.state.global_step += 1
    loop.before(loop.state)
    assert step_boundaries._step is not open_one
    assert sorted(spans()) == [10, 11]


def test_an_exception_of_the_loop_passes_and_ends_the_step(
    framework: Callable[..., Any], spans: Spans, tmp_path: Path
) -> None:
    loop = framework(
        {"name": "Loop.before", "step": "begin", "number": "state.global_step"},
        {"name": "Loop.after", "step": "end"},
        {"name": "Loop.fit", "step": "end"},
    )(broken_at=11)
    with pytest.raises(ValueError, match="theirs"):
        loop.fit(3)
    assert spans() == {10: ["update"], 11: ["update"]}
    manifest = (tmp_path / "run" / "step_000011" / "manifest.json").read_bytes()
    assert "ValueError: theirs" in str(msgspec.json.decode(manifest, type=Manifest))


def test_a_coroutine_can_be_a_step(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.train_step_async", "step": "around", "number": "step"})()
    assert asyncio.run(loop.train_step_async(3)) == 10
    assert spans() == {3: ["update"]}


def test_a_step_inside_a_step_is_a_part_of_it(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.fit", "step": "around"}, {"name": "Loop.before", "step": "around"})()
    loop.fit(2)
    assert spans() == {0: ["update", "update"]}


def test_a_boundary_inside_a_call_around_is_a_part_of_its_step(
    framework: Callable[..., Any], spans: Spans
) -> None:
    inner: list[dict[str, object]] = [
        {"name": "Loop.before", "step": "begin", "number": "state.global_step"},
        {"name": "Loop.after", "step": "end"},
        {"name": "Loop.log", "step": "next"},
    ]
    loop = framework({"name": "Loop.fit", "step": "around"}, *inner)()
    loop.fit(2)
    assert spans() == {0: ["update", "update"]}
    loop.before(loop.state)  # of a trainer that has no call around its steps
    loop.update()
    loop.after()
    assert spans()[12] == ["update"]


def test_a_capture_of_the_users_own_is_left_alone(
    framework: Callable[..., Any], spans: Spans, tmp_path: Path
) -> None:
    loop = framework({"name": "Loop.train_step", "step": "around"})()
    with capture(5):
        loop.train_step({})
    assert spans() == {5: ["update"]}


def test_a_function_can_be_a_span_and_a_boundary(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.log", "step": "next"}, {"name": "Loop.log", "role": "trainer"})()
    loop.log()
    loop.log()
    assert spans() == {0: ["log"], 1: []}


def test_a_number_that_is_none_is_logged_and_the_loop_goes_on(
    framework: Callable[..., Any],
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    failures.take()
    loop = framework({"name": "Loop.train_step", "step": "around", "number": "step"})()
    assert loop.train_step({}) == 10
    assert "step is None" in caplog.text
    assert spans() == {}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"name": "Loop.train_step", "step": "around", "number": "stpe"},
            r"its arguments: self, batch, step",
        ),
        ({"name": "Loop.train_step", "step": "around", "workers": {"actor": "wg"}}, "wg"),
        ({"name": "Loop.samples", "step": "around"}, "is a generator"),
        ({"name": "Loop.samples", "role": "env", "where": {"self.a": 1}}, "is a generator"),
    ],
)
def test_what_cannot_be_a_boundary_is_said_at_the_import(
    framework: Callable[..., Any],
    entry: dict[str, object],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    failures.take()
    assert framework(entry)().update() == 10
    failures.take()
    assert expected.replace("\\", "") in caplog.text


def test_calls_are_told_apart_by_their_arguments(
    framework: Callable[..., Any], module: str, tmp_path: Path
) -> None:
    same = {"name": "Loop.before", "role": "ref", "same": {"state": "self.state"}}
    loop = framework(same, {"name": "Loop.before", "role": "actor"})()
    with capture(0):
        loop.before(loop.state)
        loop.before(object())
    lines = [
        line
        for file in tmp_path.glob("run/step_000000/spans/*.jsonl")
        for line in msgspec.json.Decoder(Line).decode_lines(file.read_bytes())
    ]
    assert [line.role for line in lines if isinstance(line, Span)] == ["ref", "actor"]


def test_a_forked_child_leaves_the_step_to_its_parent(framework: Callable[..., Any], spans: Spans) -> None:
    loop = framework({"name": "Loop.before", "step": "begin"}, {"name": "Loop.after", "step": "end"})()
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
    monkeypatch.setattr("stepscope._recording.process.run._prepared_in", 0)
    seen = []
    entry = {"module": module, "name": "Loop.train_step", "step": "around"}
    configure(ProfileConfig(save_path=tmp_path / "run", steps=steps, instrument=[entry]))
    cls = importlib.import_module(module).Loop
    monkeypatch.setattr(cls, "update", lambda self: seen.append(backend.prepared))
    for _ in range(2):
        cls().train_step({})
    assert seen == [1, 1]


def test_the_manifest_says_that_an_entry_opened_the_capture(
    framework: Callable[..., Any], tmp_path: Path
) -> None:
    framework({"name": "Loop.train_step", "step": "around"})().train_step({})
    with capture(1):
        pass
    folders = [tmp_path / "run" / f"step_00000{step}" / "manifest.json" for step in (0, 1)]
    manifests = [msgspec.json.decode(path.read_bytes(), type=Manifest) for path in folders]
    assert [manifest.opened_by for manifest in manifests] == ["instrument", "program"]
