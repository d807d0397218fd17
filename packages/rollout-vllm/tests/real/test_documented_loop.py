"""Tests of the loop on the documentation's page about vLLM, unchanged, with two tensor-parallel workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import vllm
from vllm import AsyncEngineArgs, SamplingParams

from stepscope._recording.capture import configure
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import Sidecar
from stepscope.testing.engine_conformance import a_capture
from stepscope_report.sections.long_tail import step_long_tail
from stepscope_report.timeline import Span, load_step
from stepscope_vllm import VllmProfiler

T = TypeVar("T")
DOCS = Path(__file__).parents[4] / "docs"
PAGE = DOCS / "engines-vllm.md"
FENCE = {kind: re.compile(rf"```{kind}\n(.*?)```", re.DOTALL) for kind in ("python", "yaml")}


class User:
    """The page's program, and the event loop on which it runs."""

    def __init__(self, save_path: Path, names: dict[str, Any]) -> None:
        self.save_path = save_path
        self.names = names
        self._loop = asyncio.new_event_loop()

    @property
    def llm(self) -> Any:
        return self.names["llm"]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def step(self, step: int) -> None:
        self.run(self.names["training_step"](step, ["hello world", "good day", "one", "two"]))

    def close(self) -> None:
        self.llm.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


@pytest.fixture(scope="module")
def user(model: str, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("user")
    (lines,) = [text for text in FENCE["python"].findall(PAGE.read_text()) if "training_step" in text]
    yaml = FENCE["yaml"].findall((DOCS / "first-capture.md").read_text())[0]
    (folder / "stepscope.yaml").write_text(yaml.replace("/data/profile", str(folder / "profile")))
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core for each; they wait for each other
        patch.setattr(configure, "_configured", None)  # the program configures stepscope itself
        patch.setattr(vllm, "AsyncEngineArgs", partial(AsyncEngineArgs, tensor_parallel_size=2, **sizes))
        exec(compile(lines.replace("your/model", model), str(PAGE), "exec"), names)
        user = User(folder / "profile", names)
        try:
            yield user
        finally:
            user.close()


@pytest.fixture(scope="module")
def captured(user: User) -> RunLayout:
    """Return the run after steps 1 to 3. The configuration selects step 2."""
    for step in (1, 2, 3):
        user.step(step)
    return RunLayout(user.save_path)


def sidecars(layout: RunLayout, step: int) -> list[Sidecar]:
    loaded = [msgspec.json.decode(path.read_bytes(), type=Sidecar) for path in layout.step(step).sidecars()]
    return sorted(loaded, key=lambda sidecar: sidecar.artifact.path)


def test_the_selected_step_has_the_trace_of_each_worker_and_no_other_step_is_there(
    captured: RunLayout,
) -> None:
    assert list(captured.steps()) == [2]
    artifacts = [sidecar.artifact for sidecar in sidecars(captured, 2)]
    traces = [artifact for artifact in artifacts if artifact.tool == "vllm"]
    assert [(trace.rank, trace.world_size, trace.topology) for trace in traces] == [
        (0, 2, {"tp": 0, "pp": 0, "dp": 0}),
        (1, 2, {"tp": 1, "pp": 0, "dp": 0}),
    ]


def test_each_turn_has_its_request_and_the_engines_times_below_it(captured: RunLayout) -> None:
    spans = load_step(captured.step(2).root).spans
    turns = [index for index, span in enumerate(spans) if span.stage == "turn"]
    assert len(turns) == 4
    for turn in turns:
        assert (spans[turn].attrs or {})["request_id"] == spans[turn].trajectory
        phases = {span.stage: span for span in spans if span.parent == turn}
        assert list(phases) == ["queue", "prefill", "decode"]
        assert all(_holds(spans[turn], phase) for phase in phases.values())
        assert {phase.role for phase in phases.values()} == {"rollout"}


def _holds(outer: Span, inner: Span) -> bool:
    return outer.start_ns <= inner.start_ns <= (inner.end_ns or 0) <= (outer.end_ns or 0)


def test_the_long_tail_says_what_the_slow_turns_waited_for(captured: RunLayout) -> None:
    tail = step_long_tail(load_step(captured.step(2).root))
    assert tail is not None
    for slow in tail.worst:
        by_stage = {wait.stage: wait.wall_ns for wait in slow.waits}
        engine_ns = sum(by_stage.get(stage, 0) for stage in ("queue", "prefill", "decode"))
        assert engine_ns > slow.wall_ns / 4, by_stage  # on a busy machine, the loop itself takes half


@pytest.mark.usefixtures("captured")  # must run first, because it uses the first steps of the run
def test_of_two_ranks_the_one_that_is_asked_for_is_there_and_the_other_is_named(
    user: User, tmp_path: Path
) -> None:
    given = msgspec.structs.replace(a_capture(tmp_path, replica=4), ranks=(0, 8))

    async def record() -> Sidecar:
        profiler = VllmProfiler(user.llm, replica=4)
        await profiler.start(given)
        await generate(user, "ranks")
        (artifact,) = await profiler.stop()
        path = Path(given.step_dir) / f"{artifact.path}.meta.json"
        return msgspec.json.decode(path.read_bytes(), type=Sidecar)

    sidecar = user.run(record())
    assert (sidecar.artifact.rank, sidecar.artifact.topology) == (8, {"tp": 0, "pp": 0, "dp": 0})
    assert sidecar.options["left_aside"] == "rank 9"


async def generate(user: User, request: str) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    async for _ in user.llm.generate("hello world", sampling, request):
        pass
