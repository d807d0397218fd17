"""Entries of every kind: what a call of each records, and what it reads from the call."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable
from stepscope import capture, configure
from stepscope.files.spans import Span
from stepscope.testing.recorded_run import finished_spans
from stepscope_report import step_report
from stepscope_report.timeline.load import load_step

FRAMEWORK = '''
import asyncio

class Output:
    def __init__(self, tokens, score=0.5, name=None):
        self.name = name
        self.token_ids = list(range(tokens))
        self.score = score
        self.metrics = {"cached": 3, "text": "a prompt of a user"}

class Batch:
    def __init__(self, uids, versions=None):
        self.uids = uids
        self.versions = versions

class Agent:
    version = 4

    async def run(self, turns=2, **kwargs):
        """Answer a question."""
        for _ in range(turns):
            await self.generate(3)
        await self.call_tool({"name": "calculator"})
        return Output(7)

    async def run_at_once(self, turns, **kwargs):
        await asyncio.gather(*(self.generate(1) for _ in range(turns)))

    async def generate(self, tokens, number=None, **kwargs):
        return Output(tokens, name=kwargs.get("request"))

    def ask(self, **kwargs):
        return Output(1, name=kwargs["request"])

    async def call_tool(self, tool_call):
        await asyncio.sleep(0)

    def play(self, *args, **kwargs):
        if kwargs.get("broken"):
            raise ValueError("theirs")
        return Output(2)

    def stream(self, prompt):
        yield prompt

def scoped(fn):
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)
    return wrapper

class Trainer:
    version = 5

    @scoped
    def fit(self, batch):
        return batch

    def sample(self):
        return Batch(["a", "b"], [3, 4])

    def update(self, batch):
        return batch

    def sync(self, buckets):
        return {"sent": 1024}
'''

Entries = Callable[..., Any]
Spans = Callable[[], list[Span]]


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Provide the framework, under a name of the test's own, not yet imported."""
    name = "kinds_" + request.node.name.partition("[")[0]
    with importable(tmp_path / "modules", **{name: FRAMEWORK}):
        yield name


@pytest.fixture
def framework(module: str, tmp_path: Path) -> Entries:
    def build(*entries: dict[str, object]) -> Any:
        listed: list[Any] = [{"module": module, **entry} for entry in entries]
        configure(
            save_path=tmp_path / "run", steps="every:1", roles={"*": {"profiler": "off"}}, instrument=listed
        )
        return importlib.import_module(module)

    return build


@pytest.fixture
def spans(tmp_path: Path) -> Spans:
    return lambda: finished_spans(tmp_path / "run")


TRAJECTORY = {"name": "Agent.run", "kind": "trajectory", "id": "uid", "policy_version": "self.version"}
TURN = {"name": "Agent.generate", "kind": "turn"}
TOOL = {"name": "Agent.call_tool", "kind": "tool", "tool": "tool_call.name"}


def test_a_rollout_is_a_trajectory_with_turns_and_tools(framework: Entries, spans: Spans) -> None:
    agent = framework(TRAJECTORY, TURN, TOOL).Agent()
    with capture(0):
        asyncio.run(agent.run(uid="q1"))
    assert [(span.role, span.stage, span.trajectory, span.turn) for span in spans()] == [
        ("agent_loop", "trajectory", "q1", None),
        ("agent_loop", "turn", "q1", 0),
        ("agent_loop", "turn", "q1", 1),
        ("env", "calculator", "q1", None),
    ]
    assert {span.policy_version for span in spans()} == {4}


def test_values_are_read_from_arguments_and_the_result(framework: Entries, spans: Spans) -> None:
    values = {
        "output_tokens": "len(result.token_ids)",
        "last": "result.token_ids.6",
        "cached": "result.metrics.cached",
        "reward": "result.score",
        "turns": "turns",
        "attempt": "kwargs.attempt",
    }
    agent = framework({**TRAJECTORY, "values": values, "attrs": {"env": "math"}}).Agent()
    with capture(0):
        asyncio.run(agent.run(uid="q1", attempt=2))
    (span,) = spans()
    assert span.attrs == {
        "env": "math", "output_tokens": 7, "last": 6, "cached": 3, "reward": 0.5, "turns": 2, "attempt": 2
    }  # fmt: skip


def running(built: Any) -> None:
    asyncio.run(built.Agent().run(uid="q1", attempt=2))


def playing(built: Any) -> None:
    for uid, train in (("a", True), ("b", False)):
        built.Agent().play(uid=uid, train=train)


def updating(built: Any) -> None:
    built.Trainer().update(built.Batch(["a", "a", "b"], [0, 1, 0]))


CONSUME = {"name": "Trainer.update", "kind": "consume"}
PATHS: dict[str, tuple[dict[str, Any], Callable[[Any], None], str, list[object]]] = {
    "parts of an id": ({**TRAJECTORY, "id": ["kwargs.uid", "attempt"]}, running, "trajectory", ["q1/2"]),
    "a text with paths": (
        {**TRAJECTORY, "id": "{kwargs.uid}_{kwargs.attempt}_0"}, running, "trajectory", ["q1_2_0"]
    ),
    "texts with paths to lists": (
        {**CONSUME, "id": "{batch.uids}_{batch.versions}"}, updating, "trajectory", ["a_0", "a_1", "b_0"]
    ),
    "texts with paths to lists of the result": (
        {**CONSUME, "id": "{result.uids}_{result.versions}"}, updating, "trajectory", ["a_0", "a_1", "b_0"]
    ),
    "a condition": (
        {"name": "Agent.play", "kind": "trajectory", "id": "uid", "where": {"train": True}}, playing,
        "trajectory", ["a"],
    ),
    "the version of a turn's result": (
        {**TURN, "policy_version": "result.metrics.cached-1"},
        lambda built: asyncio.run(built.Agent().generate(3)), "policy_version", [2],
    ),
    "the version of a trajectory's result": (
        {**TRAJECTORY, "policy_version": "result.metrics.cached"}, running, "policy_version", [3]
    ),
    "the number of a turn": (
        {**TURN, "index": "number"}, lambda built: asyncio.run(built.Agent().generate(1, number=6)),
        "turn", [6],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "act", "field", "expected"), PATHS.values(), ids=PATHS)
def test_ids_versions_and_numbers_are_read_from_paths(
    entry: dict[str, Any], act: Callable[[Any], None], field: str, expected: list[object],
    framework: Entries, spans: Spans,
) -> None:  # fmt: skip
    built = framework(entry)
    with capture(0):
        act(built)
    assert [getattr(span, field) for span in spans()] == expected


@pytest.mark.parametrize(
    ("path", "name", "recorded"),
    [
        ("kwargs.request", "chatcmpl-7", "chatcmpl-7"),
        ("result.name", "7", "7"),
        ("kwargs.request", "What is 7?", None),
    ],
    ids=["argument", "result", "prompt"],
)
def test_a_turn_and_a_span_name_their_request_and_a_prompt_is_no_name(
    framework: Entries, spans: Spans, path: str, name: str, recorded: str | None
) -> None:
    built = framework({**TURN, "request": path}, {"name": "Agent.ask", "role": "rollout", "request": path})
    with capture(0):
        asyncio.run(built.Agent().generate(1, request=name))
        built.Agent().ask(request=name)
    assert [(span.attrs or {}).get("request_id") for span in spans()] == [recorded] * 2


def test_a_trajectory_without_an_id_has_one_of_its_own(framework: Entries, spans: Spans) -> None:
    agent = framework({"name": "Agent.run", "kind": "trajectory"}).Agent()
    with capture(0):
        for _ in range(2):
            asyncio.run(agent.run())
    one, other = [span.trajectory or "" for span in spans()]
    assert one != other
    assert one.startswith("run-")


def test_a_capture_that_opens_in_the_middle_of_a_trajectory_names_it(
    framework: Entries, spans: Spans
) -> None:
    agent = framework(TRAJECTORY, TURN).Agent()
    turn, calls = agent.generate, []

    async def captured_from_the_second_on(tokens: int) -> Any:
        calls.append(tokens)
        with capture(0) if len(calls) > 1 else nullcontext():
            return await turn(tokens)

    agent.generate = captured_from_the_second_on
    asyncio.run(agent.run(uid="q1"))
    assert [(span.stage, span.trajectory, span.turn) for span in spans()] == [("turn", "q1", 1)]


def test_a_decorator_that_does_not_say_what_it_wraps_hides_no_self(framework: Entries, spans: Spans) -> None:
    trainer = framework(
        {"name": "Trainer.fit", "role": "trainer", "policy_version": "self.version"}
    ).Trainer()
    with capture(0):
        trainer.fit("a batch")
    assert spans()[0].policy_version == 5


def test_turns_in_tasks_of_one_trajectory_are_counted_together(framework: Entries, spans: Spans) -> None:
    agent = framework({**TRAJECTORY, "name": "Agent.run_at_once"}, TURN).Agent()
    with capture(0):
        asyncio.run(agent.run_at_once(3, uid="a"))
        asyncio.run(agent.run_at_once(2, uid="b"))
    turns = [(span.trajectory, span.turn) for span in spans() if span.stage == "turn"]
    assert turns == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]


def test_a_weight_sync_has_its_stage_and_its_bytes(framework: Entries, spans: Spans) -> None:
    entry = {"name": "Trainer.sync", "kind": "weight_sync", "values": {"bytes": "result.sent"}}
    trainer = framework(entry).Trainer()
    with capture(0):
        trainer.sync([])
    (span,) = spans()
    assert (span.role, span.stage, span.attrs) == ("trainer", "sync_weights", {"bytes": 1024})


@pytest.mark.needs("numpy")
@pytest.mark.parametrize(
    ("name", "ids", "versions"),
    [
        ("Trainer.sample", "result.uids", "result.versions"),
        ("Trainer.update", "batch.uids", "batch.versions"),
    ],
)
def test_consumed_trajectories_are_read_from_the_arguments_or_the_result(
    framework: Entries, spans: Spans, name: str, ids: str, versions: str
) -> None:
    import numpy

    built = framework({"name": name, "kind": "consume", "id": ids, "policy_version": versions})
    with capture(0):
        if name == "Trainer.sample":
            built.Trainer().sample()
        else:
            batch = built.Batch(numpy.array(["a", "b"], dtype=object), numpy.array([3, 4]))
            built.Trainer().update(batch)
    marks = [(span.stage, span.trajectory, (span.attrs or {})["begun_version"]) for span in spans()]
    assert marks == [("consume", "a", 3), ("consume", "b", 4)]


@pytest.mark.needs("numpy")
def test_of_versions_of_each_token_the_oldest_first_one_of_a_row_counts(
    framework: Entries, spans: Spans
) -> None:
    import numpy

    paths = {"id": "batch.uids", "policy_version": "batch.versions"}
    built = framework({"name": "Trainer.update", "kind": "consume", **paths})
    with capture(0):
        tokens = [numpy.array([[-1, 4, 5, 0], [-1, -1, 3, 4]]), numpy.array([[-1, -1]])]
        built.Trainer().update(built.Batch(["a", "no token of a policy"], tokens))
    assert [(span.attrs or {}).get("begun_version") for span in spans()] == [3, None]


def test_a_name_below_a_list_is_read_of_each_of_its_items(framework: Entries, spans: Spans) -> None:
    paths = {"id": "batch.uids.name", "policy_version": "batch.uids.version"}
    built = framework({"name": "Trainer.update", "kind": "consume", **paths})
    with capture(0):
        built.Trainer().update(built.Batch([{"name": "a", "version": 3}, {"name": "b", "version": 4}]))
    marks = [(span.trajectory, (span.attrs or {})["begun_version"]) for span in spans()]
    assert marks == [("a", 3), ("b", 4)]


def test_versions_may_be_texts_and_lists_of_which_the_first_counts(framework: Entries, spans: Spans) -> None:
    consume = {
        "name": "Trainer.update",
        "kind": "consume",
        "id": "batch.uids",
        "policy_version": "batch.versions",
    }
    module = framework(consume, {**TURN, "policy_version": "number"})
    with capture(0):
        module.Trainer().update(module.Batch(["a", "b", "c"], [["3", "4"], ["5"], []]))
        asyncio.run(module.Agent().generate(1, ["6", "7"]))
    assert [(span.attrs or {}).get("begun_version") for span in spans()[:3]] == [3, 5, None]
    assert spans()[3].policy_version == 6


def test_one_function_is_a_trajectory_outside_and_a_span_inside(framework: Entries, spans: Spans) -> None:
    inner = {"name": "Agent.run", "role": "agent_loop", "stage": "answer"}
    agent = framework(inner, TRAJECTORY).Agent()
    with capture(0):
        asyncio.run(agent.run(uid="q1"))
    assert [(span.stage, span.trajectory) for span in spans()] == [("trajectory", "q1"), ("answer", "q1")]


def test_a_span_carries_the_version_of_the_weights(framework: Entries, spans: Spans) -> None:
    consumed = {"name": "Trainer.update", "kind": "consume", "id": "batch.uids"}
    update = {"name": "Trainer.update", "role": "actor", "policy_version": "self.version"}
    built = framework(update | {"values": {"rows": "len(batch.uids)"}}, consumed)
    with capture(0):
        built.Trainer().update(built.Batch(["a"]))
    span, mark = spans()
    assert (span.stage, span.policy_version, span.attrs) == ("update", 5, {"rows": 1})
    assert (mark.stage, mark.parent) == ("consume", span.span)


def test_exceptions_pass_unchanged_and_end_the_trajectory(framework: Entries, spans: Spans) -> None:
    values = {"tokens": "len(result.token_ids)"}
    agent = framework({"name": "Agent.play", "kind": "trajectory", "id": "uid", "values": values}).Agent()
    with capture(0), pytest.raises(ValueError, match="theirs"):
        agent.play(uid="a", broken=True)
    (span,) = spans()
    assert (span.error, span.attrs) == ("ValueError: theirs", None)


def test_a_path_that_leads_nowhere_is_left_out_and_logged_once(
    framework: Entries, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"tokens": "result.token_idz", "n": "result.token_ids.99"}
    agent = framework({"name": "Agent.play", "kind": "trajectory", "id": "uid", "values": values}).Agent()
    with capture(0):
        for _ in range(3):
            agent.play()
    lines = [line for line in caplog.messages if "is left out" in line]
    assert len(lines) == 3
    assert "'token_idz' in" in "".join(lines)
    assert [span.attrs for span in spans()] == [None] * 3


@pytest.mark.needs("torch")
def test_texts_and_tensors_are_no_values(
    framework: Entries, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    paths = {name: name for name in ("text", "vector", "elsewhere", "none", "scalar", "half")}
    agent = framework({"name": "Agent.play", "role": "actor", "values": paths}).Agent()
    with capture(0):
        agent.play(
            text="a prompt", vector=torch.ones(2), elsewhere=torch.ones((), device="meta"), none=None,
            scalar=torch.tensor(3), half=torch.tensor(0.5),
        )  # fmt: skip
    (span,) = spans()
    assert span.attrs == {"scalar": 3, "half": 0.5}
    assert "Tensor on meta" in caplog.text
    assert "is a str" in caplog.text
    assert "values.none" not in caplog.text


def test_an_objects_own_errors_stay_out_of_the_call(
    framework: Entries, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @property
        def size(self) -> int:
            raise RuntimeError("not yet")

    agent = framework({"name": "Agent.play", "role": "actor", "values": {"size": "batch.size"}}).Agent()
    with capture(0):
        agent.play(batch=Broken())
    assert spans()[0].attrs is None
    assert "RuntimeError: not yet" in caplog.text


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"name": "Agent.stream", "kind": "turn"}, "is a generator: it can be a plain span alone"),
        ({"name": "Trainer.sync", "kind": "trajectory", "id": "uid"}, "its arguments: self, buckets"),
        ({"name": "Trainer.sync", "kind": "weight_sync", "values": {"n": "uid"}}, "or with result"),
    ],
)
@pytest.mark.usefixtures("in_production")
def test_an_entry_that_does_not_fit_is_logged_at_the_import(
    framework: Entries, entry: dict[str, object], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert framework(entry).Trainer().sync([]) == {"sent": 1024}
    assert expected in caplog.text


def test_the_report_names_the_kinds_that_no_call_recorded(framework: Entries, tmp_path: Path) -> None:
    sample = {"name": "Trainer.sample", "kind": "consume", "id": "result.uids"}
    built = framework(TRAJECTORY, TURN, TOOL, sample)
    with capture(0):
        asyncio.run(built.Agent().call_tool({"name": "calculator"}))
        built.Trainer().sample()
    uncalled = step_report(load_step(tmp_path / "run" / "step_000000")).health.uncalled
    assert [line.partition(":")[2] for line in uncalled] == [
        "Agent.generate (agent_loop/turn)",
        "Agent.run (agent_loop/trajectory)",
    ]
