"""Runs of tests: their configuration, their processes, and what they leave on disk."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope import CaptureResult, ProfileConfig
from stepscope._recording.capture import configure
from stepscope._recording.instrument import configured, patch, step_boundaries
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.recorder import Recorder
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Expectation, Manifest, ProcessPart
from stepscope.files.manifest_parts import fold, read_parts

SPANS_ALONE = {"*": {"profiler": "off"}}
"""Roles of a configuration that records spans, and profiles nothing."""


def spans_alone(folder: Path, **settings: Any) -> ProfileConfig:
    """Return a configuration that captures each step and profiles nothing, except for `settings`."""
    always = {"save_path": str(folder), "steps": "every:1", "roles": SPANS_ALONE}
    return ProfileConfig.from_mapping(always | settings)


def manifest_of(captured: CaptureResult | StepLayout) -> Manifest:
    """Return the manifest of a step from the parts of its processes, which are all readable."""
    if isinstance(captured, CaptureResult):
        assert captured.path is not None
        captured = StepLayout(captured.path)
    parts, unreadable = read_parts(captured)
    assert unreadable == {}
    return fold(parts)


def part_of(captured: CaptureResult | StepLayout) -> ProcessPart:
    """Return the part of the process that captured a step alone."""
    (part,) = manifest_of(captured).processes
    return part


def outcomes(captured: CaptureResult | StepLayout | Manifest) -> dict[str, Expectation]:
    """Return {name: outcome} of what the processes of a step were to leave."""
    manifest = captured if isinstance(captured, Manifest) else manifest_of(captured)
    return {item.name: item for part in manifest.processes for item in part.expected}


def step_of(config: ProfileConfig, step: int = 1) -> StepLayout:
    return RunLayout(config.save_path).step(step)


def standing_recorder() -> Recorder:
    """Return the flight recorder of this process."""
    found = standing.standing()
    assert found is not None
    return found


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def at_once(count: int, work: Callable[[int], object]) -> None:
    """Call `work(number)` in as many threads, which begin together. Fails if any call does."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@contextmanager
def handling(signum: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    """Have a signal handled by `handler` in the block."""
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)


def python(code: str, *arguments: object, status: int = 0, **variables: str) -> str:
    """Return the output of a Python process, errors behind it. Its exit code must be `status`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def ranks(number: int, program: str, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a program as so many ranks of one run. Those that still run are killed at the end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    one_run = {**os.environ, "WORLD_SIZE": str(number), "STEPSCOPE_RUN_ID": "feed0001"}
    with ExitStack() as running:
        started = []
        for rank in range(number):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**one_run, "RANK": str(rank)},
            )  # fmt: skip
            started.append(running.enter_context(process))
            running.callback(process.kill)
        yield started


@contextmanager
def importable(folder: Path, **sources: str) -> Iterator[Callable[[], ModuleType]]:
    """Write modules that a test instruments. Yield what imports the first; forget all of them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        patched.setattr(configure, "_configured", None)
        patched.setattr(step_boundaries, "_next", 0)
        yield lambda: importlib.import_module(next(iter(sources)))
        step_boundaries.switch(step_boundaries._finish(None))
        configured.apply(ProfileConfig())
        for handle in list(patch._instruments.values()):
            handle.remove()
        for name in sources:
            sys.modules.pop(name, None)
