"""Torch generation in this process: recorded wherever it runs, for the iterations asked for."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from stepscope.backends import Window, load_backend
from stepscope.config import ProfileConfig
from stepscope.engines import passes
from stepscope.engines.protocol import EngineCapture, EngineProfiler, Iterations, load_engine, recognise
from stepscope.engines.torch_inprocess import TorchRolloutProfiler, iteration
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.testing.engine_conformance import EngineConformance, MakeProfiler, a_capture

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")


class Decoder:
    """A decode loop: each iteration is one call of the module, inside a range that names it."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.done = 0

    def generate(self, iterations: int, after_each: Callable[[], None] = lambda: None) -> None:
        for _ in range(iterations):
            with torch.profiler.record_function(f"iteration {self.done}"):
                began_ns = time.monotonic_ns()
                self.model(torch.ones(1, 8))
                if (log := passes.current()) is not None:
                    log.note(began_ns, time.monotonic_ns(), "decode", {"one": 1}, [1], running=1, waiting=0)
            self.done += 1
            after_each()


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


class TestTorchRollout(EngineConformance):
    honours = frozenset({"iterations", "with_stack", "record_shapes"})
    side_by_side = False

    @pytest.fixture
    def make_profiler(self, decoder: Decoder) -> MakeProfiler:
        self.decoder = decoder
        return lambda tmp_path, replica: TorchRolloutProfiler(decoder.model, replica=replica)

    async def work(self, profiler: EngineProfiler, iterations: int) -> None:
        await asyncio.to_thread(self.decoder.generate, iterations)

    async def fail_halfway(self, profiler: EngineProfiler) -> None:
        self.users = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.users.start()

    async def repair(self, profiler: EngineProfiler) -> None:
        self.users.stop()


def names_in(artifact: Artifact, capture: EngineCapture) -> list[str]:
    """Return the names of the events of a trace, in the order of their begin."""
    with gzip.open(Path(capture.step_dir) / artifact.path) as file:
        events = json.load(file)["traceEvents"]
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    return [event["name"] for event in spans]


def iterations_in(artifacts: list[Artifact], capture: EngineCapture) -> list[int]:
    (artifact,) = artifacts
    return [int(name.split()[1]) for name in names_in(artifact, capture) if name.startswith("iteration ")]


def windowed(root: Path, start: int, count: int | None) -> EngineCapture:
    return msgspec.structs.replace(a_capture(root), iterations=Iterations(start=start, count=count))


async def on_the_loop(decoder: Decoder) -> None:
    decoder.generate(3)


async def on_a_worker_thread(decoder: Decoder) -> None:
    await asyncio.to_thread(decoder.generate, 3)


@pytest.mark.parametrize("generate", [on_the_loop, on_a_worker_thread])
async def test_generation_is_recorded_on_whatever_thread_it_runs(
    decoder: Decoder, tmp_path: Path, generate: Callable[[Decoder], Any]
) -> None:
    profiler, capture = TorchRolloutProfiler(decoder.model, replica=0), a_capture(tmp_path)
    await profiler.start(capture)
    await generate(decoder)
    (artifact,) = await profiler.stop()
    assert names_in(artifact, capture).count("aten::linear") == 3
    assert artifact.kind == "torch_trace"
    assert artifact.rank is None
    assert artifact.pid is not None


@pytest.mark.parametrize(
    ("start", "count", "expected"), [(0, 2, [0, 1]), (3, 2, [3, 4]), (4, None, [4, 5, 6, 7]), (7, 5, [7])]
)
@pytest.mark.parametrize("counted", ["by the module", "by the profiler", "by the function", "twice"])
async def test_only_the_iterations_asked_for_are_recorded(
    decoder: Decoder, tmp_path: Path, start: int, count: int | None, expected: list[int], counted: str
) -> None:
    profiler = TorchRolloutProfiler(decoder.model if counted in ("by the module", "twice") else None)
    tick = {"by the profiler": profiler.iteration, "by the function": iteration, "twice": profiler.iteration}
    capture = windowed(tmp_path, start, count)
    await profiler.start(capture)
    decoder.generate(8, tick.get(counted, lambda: None))
    assert iterations_in(await profiler.stop(), capture) == expected
    assert "iterations" not in profiler.ignored
    assert not decoder.model._forward_hooks


async def test_iterations_that_nothing_counts_are_reported_v16(decoder: Decoder, tmp_path: Path) -> None:
    profiler, capture = TorchRolloutProfiler(), windowed(tmp_path, 0, 2)
    await profiler.start(capture)
    decoder.generate(4)
    assert iterations_in(await profiler.stop(), capture) == [0, 1, 2, 3]
    assert "call its iteration()" in profiler.ignored["iterations"]


async def test_a_window_that_is_never_reached_is_an_error_v16(decoder: Decoder, tmp_path: Path) -> None:
    profiler = TorchRolloutProfiler(decoder.model)
    await profiler.start(windowed(tmp_path, 100, 2))
    decoder.generate(4)
    with pytest.raises(EngineError, match=r"start is 100, .* 4 "):
        await profiler.stop()
    assert not decoder.model._forward_hooks


async def test_a_profiler_that_cannot_begin_in_mid_generation_leaves_the_generation_alone(
    decoder: Decoder, tmp_path: Path
) -> None:
    profiler = TorchRolloutProfiler(decoder.model)
    await profiler.start(windowed(tmp_path, 1, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        decoder.generate(4)
    assert decoder.done == 4
    with pytest.raises(EngineError, match="not stepscope's"):
        await profiler.stop()


async def test_a_capture_of_this_process_with_the_torch_backend_keeps_the_process(
    decoder: Decoder, tmp_path: Path
) -> None:
    backend = load_backend("torch", ProfileConfig(torch={"activities": ["cpu"]}))
    process = ProcessInfo(role="trainer", rank=0, world_size=1, host="here", pid=1)
    backend.start(Window(step=1, process=process, stage=None, index=0))
    with pytest.raises(EngineError, match="in this process"):
        await TorchRolloutProfiler(decoder.model).start(a_capture(tmp_path, step=2))
    for pending in backend.stop():
        pending.discard()


async def test_a_recording_that_nobody_ends_is_cut_short_and_kept(decoder: Decoder, tmp_path: Path) -> None:
    profiler = TorchRolloutProfiler(decoder.model)
    capture = msgspec.structs.replace(a_capture(tmp_path), seconds=0.05)
    await profiler.start(capture)
    decoder.generate(1)
    recording = profiler._recording
    assert recording is not None
    watchdog = recording._watchdog
    assert watchdog is not None
    await asyncio.to_thread(watchdog.join)
    decoder.generate(1)
    (artifact,) = await profiler.stop()
    assert "0.05 s" in str(artifact.truncated)
    assert iterations_in([artifact], capture) == [0]


async def test_generation_that_goes_on_during_start_and_stop_is_left_alone(
    decoder: Decoder, tmp_path: Path
) -> None:
    stop = threading.Event()

    def generate() -> int:
        while not stop.is_set():
            decoder.generate(1)
        return decoder.done

    profiler = TorchRolloutProfiler(decoder.model)
    await asyncio.to_thread(profiler.check)
    generating = asyncio.create_task(asyncio.to_thread(generate))
    try:
        for step in range(1, 6):
            capture = msgspec.structs.replace(a_capture(tmp_path, step=step), iterations=Iterations(count=3))
            await profiler.start(capture)
            await _seen(profiler, 3)
            # The range of the one under way at the beginning is not there, or that of the next one is.
            assert 2 <= len(iterations_in(await profiler.stop(), capture)) <= 4
    finally:
        stop.set()
    assert await generating == decoder.done


async def _seen(profiler: TorchRolloutProfiler, iterations: int) -> None:
    recording = profiler._recording
    assert recording is not None
    while recording.seen < iterations:  # noqa: ASYNC110  (the module's hook has no event, and needs none)
        await asyncio.sleep(0.001)


async def test_an_unwritable_folder_is_an_error_and_the_next_capture_works(
    decoder: Decoder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    profiler, capture = TorchRolloutProfiler(decoder.model), a_capture(tmp_path)
    await profiler.start(msgspec.structs.replace(capture, out_dir=str(tmp_path / "file" / "folder")))
    with pytest.raises(EngineError, match="NotADirectoryError"):
        await profiler.stop()
    await profiler.start(capture)
    decoder.generate(1)
    assert iterations_in(await profiler.stop(), capture) == [0]


def test_the_adapter_knows_modules_and_what_holds_them(decoder: Decoder) -> None:
    factory = load_engine("torch")
    assert factory.recognises(decoder.model)
    assert factory.recognises(decoder)
    assert not factory.recognises(SimpleNamespace(model="llama"))
    assert not factory.recognises(3)
    profiler = recognise(decoder, 2)
    assert isinstance(profiler, TorchRolloutProfiler)
    assert profiler.replica == 2
    assert profiler._module is decoder.model


def test_with_several_modules_none_is_counted(decoder: Decoder) -> None:
    both = SimpleNamespace(actor=decoder.model, draft=torch.nn.Linear(2, 2))
    assert cast(TorchRolloutProfiler, load_engine("torch")(both, 0))._module is None


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, stepscope.engines.torch_inprocess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
