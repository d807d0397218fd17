"""verl's workers and trainer over the stand-in: what verl's own profiler tests say of behaviour, and more."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope._recording.after import pipeline
from stepscope._recording.output import exporter
from stepscope._recording.spans import slot
from stepscope.errors import VerlDifference
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.records import Manifest
from stepscope.files.spans import Line, Span
from stepscope.integrations import verl_dist_profiler as verl
from stepscope.integrations.verl_dist_profiler import DistProfiler, DistProfilerExtension
from tests.downloads import wheel


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert slot.active is None
    assert verl._capture is None


@pytest.fixture
def role_config(tmp_path: Path) -> dict[str, Any]:
    """verl's block of one role."""
    tool_config = {"torch": {"contents": ["cpu"], "discrete": False}}
    return {
        "tool": "torch",
        "enable": True,
        "all_ranks": True,
        "ranks": [],
        "save_path": str(tmp_path),
        "tool_config": tool_config,
    }


class Worker(DistProfilerExtension):
    """As verl writes its workers."""

    def __init__(self, config: dict[str, Any], rank: int = 0, role: str = "actor") -> None:
        self.calls = 0
        tool_config = config["tool_config"][config["tool"]]
        profiler = DistProfiler(rank=rank, config=config, tool_config=tool_config, save_file_prefix=role)
        super().__init__(profiler)

    @DistProfiler.annotate(color="red", role="actor_update", scheduled=True)
    def update_actor(self, batch: int) -> int:
        self.calls += 1
        if batch < 0:
            raise ValueError("a bad batch")
        return batch

    @DistProfiler.annotate(color="olive")
    async def generate(self, prompt: str) -> str:
        await asyncio.sleep(0)
        return prompt


def spans_of(folder: Path, step: int) -> list[Span]:
    decode = msgspec.json.Decoder(Line).decode_lines
    files = RunLayout(str(folder)).step(step).spans.glob("*.jsonl")
    return [line for file in files for line in decode(file.read_bytes()) if isinstance(line, Span)]


def manifest_of(folder: Path, step: int) -> Manifest:
    return msgspec.json.decode(RunLayout(str(folder)).step(step).manifest.read_bytes(), type=Manifest)


def test_annotated_methods_are_stages_of_the_workers_role(
    role_config: dict[str, Any], tmp_path: Path
) -> None:
    worker = Worker(role_config)
    worker.start_profile(role="train", profile_step=3)
    assert worker.update_actor(7) == 7
    worker.stop_profile()
    (span,) = spans_of(tmp_path, 3)
    assert (span.role, span.stage, span.step) == ("actor", "actor_update", None)


def test_what_cannot_be_timed_is_called_all_the_same(
    role_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")

    class Partly(Worker):
        add: Any = DistProfiler.annotate(role="add")(functools.partial(lambda worker, n: n + 1))

    worker = Partly(role_config)
    worker.start_profile(profile_step=3)
    assert worker.add(7) == 8
    worker.stop_profile()


def test_the_command_at_the_end_runs_after_each_capture(role_config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(VerlDifference, match="finish_hook_cmd runs after each captured step here"):
        worker = Worker(role_config | {"finish_hook_cmd": 'echo "$VERL_PROFILE_SAVE_PATH"'})
    for step in (3, 4):
        worker.start_profile(profile_step=step)
        worker.stop_profile()
    assert not exporter.exporter().drain(60)
    pipeline.end("the test ended", 60, patient=True)
    for step in (3, 4):
        folder = RunLayout(str(tmp_path)).step(step).root
        (log,) = folder.glob("finish_actor_rank0_*.log")
        assert log.read_text() == f"{folder}\n"


async def test_an_async_method_is_timed_to_its_end(role_config: dict[str, Any], tmp_path: Path) -> None:
    worker = Worker(role_config)
    assert inspect.iscoroutinefunction(worker.generate)
    worker.start_profile(profile_step=3)
    assert await worker.generate("why") == "why"
    worker.stop_profile()
    assert [span.stage for span in spans_of(tmp_path, 3)] == ["generate"]


@pytest.mark.needs("torch")
def test_a_window_of_torch_is_written_for_the_step(role_config: dict[str, Any], tmp_path: Path) -> None:
    import torch

    worker = Worker(role_config)
    worker.start_profile(profile_step=3)
    torch.ones(3).sum()
    worker.stop_profile()
    from stepscope import flush

    assert flush() == []
    (trace,) = (tmp_path / "step_000003/traces/actor").glob("*.json.gz")
    assert "rank0" in trace.name


def test_what_a_stage_raises_passes_through_and_it_runs_once(
    role_config: dict[str, Any], tmp_path: Path
) -> None:
    worker = Worker(role_config)
    worker.start_profile(profile_step=3)
    with pytest.raises(ValueError, match="a bad batch"):
        worker.update_actor(-1)
    worker.stop_profile()
    assert worker.calls == 1
    (span,) = spans_of(tmp_path, 3)
    assert span.error == "ValueError: a bad batch"


def test_a_leaked_start_does_not_disable_the_later_ones(role_config: dict[str, Any], tmp_path: Path) -> None:
    worker = Worker(role_config)
    for step in (3, 4):
        worker.start_profile(profile_step=step)
        worker.start_profile(profile_step=step)  # twice, as two calls of a trainer that lost count
        worker.update_actor(1)
        worker.stop_profile()
        worker.stop_profile()
    assert [len(spans_of(tmp_path, step)) for step in (3, 4)] == [1, 1]


def test_profilers_nested_in_one_process_share_the_capture_of_the_first(
    role_config: dict[str, Any], tmp_path: Path
) -> None:
    outer, inner = Worker(role_config), Worker(role_config, role="critic")
    outer.start_profile(profile_step=3)
    inner.start_profile(profile_step=3)
    inner.update_actor(1)
    inner.stop_profile()  # did not open it, so does not close it
    outer.update_actor(1)
    outer.stop_profile()
    assert sorted(str(span.role) for span in spans_of(tmp_path, 3)) == ["actor", "critic"]


def test_a_disabled_role_is_left_alone(role_config: dict[str, Any], tmp_path: Path) -> None:
    worker = Worker(role_config | {"enable": False})
    assert not worker.profiler.check_enable()
    worker.start_profile(profile_step=3)
    assert not worker.profiler.check_this_step()
    assert worker.update_actor(1) == 1
    worker.stop_profile()
    assert list(tmp_path.iterdir()) == []


def test_without_a_step_nothing_is_filed_under_a_wrong_one(
    role_config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(role_config)
    worker.start_profile()
    worker.stop_profile()
    assert "start_profile got no profile_step" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("all_ranks", "ranks", "selected"),
    [(True, [], [True, True]), (False, [1], [False, True]), (False, [0, 1], [True, True])],
)
def test_ranks_are_selected_as_in_verl(
    role_config: dict[str, Any], all_ranks: bool, ranks: list[int], selected: list[bool]
) -> None:
    config = role_config | {"all_ranks": all_ranks, "ranks": ranks}
    assert [Worker(config, rank=rank).profiler.check_this_rank() for rank in (0, 1)] == selected


@pytest.mark.needs("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_a_trainer_starts_on_ray_are_one_run(
    role_config: dict[str, Any], tmp_path: Path
) -> None:
    import ray

    workers: list[Any] = [
        ray.remote(num_cpus=0)(Worker).remote(role_config, rank, role)
        for rank, role in ((0, "actor"), (1, "actor"), (0, "critic"))
    ]
    ray.get([worker.start_profile.remote(profile_step=3) for worker in workers])
    assert ray.get([worker.update_actor.remote(5) for worker in workers]) == [5, 5, 5]
    ray.get([worker.stop_profile.remote() for worker in workers])
    for worker in workers:
        ray.kill(worker)
    manifest = manifest_of(tmp_path, 3)
    who = sorted((part.process.role, part.process.rank) for part in manifest.processes)
    assert who == [("actor", 0), ("actor", 1), ("critic", 0)]
    assert len({part.run_id for part in manifest.processes}) == 1


@pytest.mark.parametrize("release", ["0.5.0", "0.6.1", "0.7.1", "0.8.0", "0.9.1"])
def test_every_use_that_verl_makes_of_it_is_understood(release: str) -> None:
    uses = list(calls_in(wheel(f"verl=={release}") / "verl"))
    annotations = [keywords for name, keywords in uses if name == "DistProfiler.annotate"]
    assert len(annotations) >= 4
    for keywords in annotations:
        DistProfiler.annotate(**keywords)
    asked = {name.rpartition(".")[2] for name, _ in uses if ".profiler." in name}
    asked -= {"profile", "schedule", "record_function", "tensorboard_trace_handler"}  # torch.profiler's
    assert {name for name in asked if name.startswith(("check_", "is_", "start", "stop", "step"))} <= set(
        dir(DistProfiler)
    )


def calls_in(package: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted name, its keywords that are constants) of every call in the workers and trainers of verl."""
    for folder in ("workers", "trainer"):
        for file in (package / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    constants = {
                        word.arg: word.value.value
                        for word in node.keywords
                        if word.arg and isinstance(word.value, ast.Constant)
                    }
                    yield ast.unparse(node.func), constants
