"""Engines of loops that nobody edits: found through boundaries, or registered in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import importable, outcomes, spans_alone
from stepscope import configure
from stepscope._recording.instrument import configured
from stepscope._recording.process import failures
from stepscope.engines import local_engines
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Expectation

pytest.importorskip("torch")

FRAMEWORK = """
import torch

class Server:
    def __init__(self, host, port):
        self.host, self.port = host, port

class Trainer:
    def __init__(self):
        self.engine = torch.nn.Linear(4, 4)
        self.twins = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        self.url = "http://localhost:1"
        self.servers = [Server("one", 1), Server("two", 2)]
        self.addresses = ["localhost:3", "localhost:4"]
        self.nothing = None
        self.rank = 2

    def build(self):
        self.engine = torch.nn.Linear(4, 4)
        return self.engine

    def launch(self):
        return self.twins

    def build_none(self):
        return None

    def step(self):
        return float(self.engine(torch.ones(1, 4)).detach().sum())

    async def step_async(self):
        return self.step()
"""


Build = Callable[..., Any]
Rows = Callable[[int], dict[str, Expectation]]


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Configure boundaries with engines, import the framework, and return a trainer."""
    monkeypatch.setattr(local_engines, "_entries", [])
    monkeypatch.setattr("stepscope._recording.process.identity._prepared_in", 0)
    with importable(tmp_path / "modules", engine_loop=FRAMEWORK) as imported:

        def build(engines: dict[str, str], *kinds: dict[str, object], **rollout: object) -> Any:
            entries: list[dict[str, object]] = [
                {"name": f"Trainer.{name}", "step": "around", "engines": engines}
                for name in ("step", "step_async")
            ]
            entries += [{"kind": "engine", "adapter": "torch", **kind} for kind in kinds]
            off = {"profiler": "off"}
            roles = {"rollout": {**off, "ranks": "all", **rollout}, "*": off}
            listed = [{"module": "engine_loop", **entry} for entry in entries]
            configure(spans_alone(tmp_path / "run", roles=roles, instrument=listed))
            return imported().Trainer()

        yield build


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """`rows(step)`: {label: row} of the engines in its manifest."""

    def read(step: int) -> dict[str, Expectation]:
        left = outcomes(RunLayout(tmp_path / "run").step(step))
        return {name: item for name, item in left.items() if item.kind == "engine"}

    return read


def test_the_engine_at_the_path_is_recorded_in_each_step(framework: Build, rows: Rows) -> None:
    trainer = framework({"torch": "self.engine"})
    plain = trainer.step()
    assert trainer.step() == plain
    for step in (0, 1):
        (row,) = rows(step).values()
        assert (row.name, row.state) == ("replica 0", "ok")
        assert row.artifacts[0].path.startswith("traces/rollout/replica0/")


def test_a_step_that_is_a_coroutine_records_its_engine(framework: Build, rows: Rows) -> None:
    asyncio.run(framework({"torch": "self.engine"}).step_async())
    assert rows(0)["replica 0"].state == "ok"


Act = Callable[[Any], object]
BUILD: dict[str, object] = {"name": "Trainer.build", "engine": "result", "replica": "self.rank"}
LAUNCH: dict[str, object] = {"name": "Trainer.launch", "engine": "result"}
AT: dict[str, dict[str, str]] = {
    name: {"torch": f"self.{name}"} for name in ("engine", "nothing", "rank", "url")
}
TWO = {"replica 0", "replica 1"}


def registered(number: int) -> Act:
    return lambda trainer: local_engines.register("torch", trainer.engine, number)


def twins(trainer: Any) -> None:
    for engine in trainer.twins:
        local_engines.register("torch", engine, 0)


def gone(trainer: Any) -> None:
    registered(0)(trainer)
    trainer.engine = type(trainer.engine)(4, 4)


FOUND: dict[str, tuple[dict[str, str], list[dict[str, object]], Act, set[str], str]] = {
    "registered": ({}, [], registered(3), {"replica 3"}, "ok"),
    "registered and at a path": (AT["engine"], [], registered(1), {"replica 1"}, "ok"),
    "of equal numbers": ({}, [], twins, TWO, ""),
    "gone": ({}, [], gone, set(), ""),
    "a path that leads to nothing": (AT["nothing"], [], bool, set(), ""),
    "unknown to the adapter": (AT["rank"], [], bool, {"replica 0"}, "knows no builtins.int"),
    "the url of a server": (AT["url"], [], bool, {"replica 0"}, "'http://localhost:1'"),
    "returned by a call": ({}, [BUILD], lambda trainer: trainer.build(), {"replica 2"}, "ok"),
    "built anew": ({}, [BUILD], lambda trainer: (trainer.build(), trainer.build()), {"replica 2"}, "ok"),
    "all of a list": ({}, [LAUNCH], lambda trainer: trainer.launch(), TWO, ""),
}


@pytest.mark.parametrize(("engines", "kinds", "act", "labels", "what"), FOUND.values(), ids=FOUND)
def test_engines_are_found_once_under_their_numbers(
    engines: dict[str, str], kinds: list[dict[str, object]], act: Act, labels: set[str], what: str,
    framework: Build, rows: Rows,
) -> None:  # fmt: skip
    """`what` is the state of the engine, or the reason why it has no recording; torch records one alone."""
    trainer = framework(engines, *kinds)
    act(trainer)
    trainer.step()
    found = rows(0)
    assert set(found) == labels
    for label, row in found.items():
        if what == "ok":
            assert row.artifacts[0].path.startswith(f"traces/rollout/{label.replace(' ', '')}/")
        elif what:
            assert row.state == "failed"
            assert what in str(row.reason)


def test_engines_can_be_switched_off(framework: Build, rows: Rows) -> None:
    framework(AT["engine"], engine={"profiler": "off"}).step()
    assert rows(0) == {}


def test_an_adapter_that_is_not_installed_is_one_line(
    framework: Build, rows: Rows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_warned", set())
    trainer = framework({"absent": "self.engine"})
    trainer.step()
    trainer.step()
    assert rows(1) == {}
    (line,) = [line for line in caplog.messages if "'absent'" in line]
    assert "Fix: pip install" in line


def test_a_call_that_made_no_engine_registers_none(
    framework: Build, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = framework({}, {"name": "Trainer.build_none", "engine": "result"})
    trainer.build_none()
    trainer.step()
    assert rows(0) == {}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not [text for text in warnings if "engine" in text]  # another test's Ray may run here


@pytest.mark.parametrize(
    ("engine", "urls"),
    [
        ("http://{self.servers.host}:{self.servers.port}", ["http://one:1", "http://two:2"]),
        ("http://{self.addresses}", ["http://localhost:3", "http://localhost:4"]),
        ("self.url", ["http://localhost:1"]),
    ],
)
@pytest.mark.usefixtures("in_production")  # the recorder's sampler notes such a server too
def test_servers_are_registered_by_their_urls_once(
    framework: Build, rows: Rows, engine: str, urls: list[str]
) -> None:
    trainer = framework({}, {"name": "Trainer.launch", "engine": engine})
    for _ in range(2):
        trainer.launch()
    assert [entry.engine for entry in local_engines.registered("torch")] == urls
    trainer.step()
    assert {row.state for row in rows(0).values()} == {"failed"}
    assert "drives no servers" in str([row.reason for row in rows(0).values()])


def test_a_url_whose_parts_are_not_there_registers_nothing(
    framework: Build, caplog: pytest.LogCaptureFixture
) -> None:
    framework({}, {"name": "Trainer.launch", "engine": "http://{self.host}:{self.rank}"}).launch()
    assert local_engines.registered() == []
    assert "at self.host" in caplog.text


def test_an_engine_entry_is_no_function_that_a_step_has_to_call(framework: Build, tmp_path: Path) -> None:
    framework({}, BUILD).step()
    assert configured.timed() == {}
