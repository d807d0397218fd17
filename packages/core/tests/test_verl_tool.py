"""The profiler of a verl worker whose tool is stepscope, with verl's own configuration classes."""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

pytest.importorskip("omegaconf")

from stepscope._recording.spans import slot
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.spans import Line, Span
from stepscope.integrations import verl_tool
from stepscope.integrations.verl_tool import WorkerProfiler
from tests.downloads import wheel


@pytest.fixture(scope="module", params=["0.7.1", "0.8.0", "0.9.1"])
def verl(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`verl.utils.profiler.config` of a release, whose packages are not run: they import vLLM and more."""
    root = wheel(f"verl=={request.param}")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("verl", "verl.utils", "verl.utils.profiler"):
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            patch.setitem(sys.modules, name, package)
        yield importlib.import_module("verl.utils.profiler.config")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.fixture
def make(verl: Any, tmp_path: Path) -> Iterator[Any]:
    def build(role: str = "actor", **options: Any) -> WorkerProfiler:
        torch = verl.TorchProfilerToolConfig(**({"contents": ["cpu"]} | options))
        config = verl.ProfilerConfig(
            tool="stepscope",
            enable=True,
            all_ranks=True,
            save_path=str(tmp_path),
            tool_config={"torch": torch},
        )
        return WorkerProfiler(0, config, role)

    yield build
    assert slot.session() is None
    assert verl_tool._capture is None


def double(number: int) -> int:
    return 2 * number


def called(profiler: WorkerProfiler, method: Any, *args: object) -> Any:
    """Return what verl's `DistProfiler.annotate` returns of a call: it decorates at each."""
    return profiler.annotate(message=None, color="red", role="actor_update")(method)(*args)


def spans_of(folder: Path, step: int) -> list[Span]:
    decode = msgspec.json.Decoder(Line).decode_lines
    files = RunLayout(str(folder)).step(step).spans.glob("*.jsonl")
    return [line for file in files for line in decode(file.read_bytes()) if isinstance(line, Span)]


def test_annotated_methods_are_stages_of_the_workers_role(make: Any, tmp_path: Path) -> None:
    async def generate(prompt: str) -> str:
        await asyncio.sleep(0)
        return prompt

    profiler = make()
    profiler.start(role="train", profile_step="3")
    assert called(profiler, double, 7) == 14
    assert asyncio.run(called(profiler, generate, "why")) == "why"
    profiler.stop()
    assert [(span.role, span.stage) for span in spans_of(tmp_path, 3)] == [("actor", "actor_update")] * 2


def test_what_a_stage_raises_passes_through_and_it_runs_once(make: Any, tmp_path: Path) -> None:
    calls = []

    def update() -> None:
        calls.append(1)
        raise ValueError("a bad batch")

    profiler = make()
    profiler.start(profile_step=3)
    with pytest.raises(ValueError, match="a bad batch"):
        called(profiler, update)
    profiler.stop()
    assert len(calls) == 1
    assert [span.error for span in spans_of(tmp_path, 3)] == ["ValueError: a bad batch"]


def test_what_cannot_be_timed_is_called_all_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    profiler = make()
    profiler.start(profile_step=3)
    assert called(profiler, functools.partial(lambda n: n + 1), 7) == 8
    profiler.stop()


def test_a_second_start_and_a_second_stop_do_nothing(make: Any, tmp_path: Path) -> None:
    profiler = make()
    for step in (3, 4):
        profiler.start(profile_step=step)
        profiler.start(profile_step=step)
        called(profiler, double, 1)
        profiler.stop()
        profiler.stop()
    assert [len(spans_of(tmp_path, step)) for step in (3, 4)] == [1, 1]


def test_profilers_of_one_process_share_the_capture_of_the_first(make: Any, tmp_path: Path) -> None:
    outer, inner = make(), make("critic")
    outer.start(profile_step=3)
    inner.start(profile_step=3)
    called(inner, double, 1)
    inner.stop()  # did not open the capture, so does not close it
    called(outer, double, 1)
    outer.stop()
    assert sorted(str(span.role) for span in spans_of(tmp_path, 3)) == ["actor", "critic"]


def test_without_a_step_nothing_is_filed_under_a_wrong_one(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = make()
    profiler.start()
    profiler.stop()
    assert "no profile_step" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("discrete", [False, True])
def test_options_are_those_of_verls_tool_torch(make: Any, discrete: bool) -> None:
    config = make(discrete=discrete, contents=["cpu", "stack"])._config
    assert (config.mode, config.torch.with_stack) == ("discrete" if discrete else "continuous", True)
    assert list(config.roles) == ["actor"]


def test_options_that_stepscope_does_not_have_are_refused(make: Any) -> None:
    options = {"torch": {"contents": ["kernels"]}}
    config: Any = type(
        "Config", (), {"all_ranks": True, "ranks": [], "save_path": "x", "tool_config": options}
    )
    with pytest.raises(ConfigError) as caught:
        WorkerProfiler(0, config, "actor")
    assert str(caught.value.field).endswith("torch.contents")
