"""Settings and fixtures of all tests. Files that import an absent package (torch, an engine) are left out."""

from __future__ import annotations

import ast
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

# No example has a deadline: a busy machine is not a defect.
hypothesis.settings.register_profile("stepscope", deadline=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000)  # on request: hours
hypothesis.settings.load_profile("stepscope")
# A shell starts background commands with SIGINT ignored, and children inherit this. Tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python's readline sets COLUMNS and LINES in child processes, such as pytest-xdist's, and commands use them.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# torch's threads spin while they wait: beside other tests, two threads take six times the CPU of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ENGINES = {
    "vllm",
    "sglang",
    "torch_npu",
    "hta",
    "wandb",
    "trl",
    "viztracer",
    "atheris",
    "opentelemetry",
    "lightning",
    "hydra",
    "mkdocs",
    "loguru",
    "nbclient",
    "mcp",
}
"""Engines and other packages whose tests run in an environment of their own."""
OPTIONAL = {
    "torch",
    "ray",
    "numpy",
    "uvloop",
    "tenacity",
    "opencensus",
    *ENGINES,
}  # opencensus belongs to ray[default]
ABSENT = {name for name in OPTIONAL if find_spec(name) is None}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and needed_at_the_top(collection_path) & ABSENT:
        return True
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too; so does a path")


def pytest_configure(config: pytest.Config) -> None:
    """Turn on `--slow` if the command line names a path. Processes of pytest-xdist get this option too."""
    config.option.slow |= config.args_source is not pytest.Config.ArgsSource.TESTPATHS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests on real engines more time, since an engine takes minutes to start on two busy cores.

    Without `--slow`, also leave out the tests marked `slow`.
    """
    for item in items:
        if item.path.parent.name == "real" or item.path.name.startswith("two_"):
            item.add_marker(pytest.mark.timeout(1200))
    if not config.option.slow and (slow := [item for item in items if item.get_closest_marker("slow")]):
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)


def pytest_collection_finish() -> None:
    """Exclude all objects so far from garbage collection: with torch loaded, one collection takes 0.9 s."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        if mark.args[0] in ABSENT:
            pytest.skip(f"needs {mark.args[0]}")


def pytest_report_header(config: pytest.Config) -> str | None:
    folders = config.getini("testpaths")
    files = sorted(file for folder in folders for file in config.rootpath.glob(f"{folder}/**/test_*.py"))
    left_out = [str(file.relative_to(config.rootpath)) for file in files if needed_at_the_top(file) & ABSENT]
    if not left_out:
        return None
    return f"not installed here: {', '.join(sorted(ABSENT))}; so left out: {', '.join(left_out)}"


PROCESS_STATE = {
    "stepscope._recording.session.pipeline": ("artifact_hooks", "capture_hooks", "report_hooks", "_failed"),
    "stepscope._recording.capture.conclusion": ("_is_torch_explained",),
    "stepscope._recording.capture.configure": ("_configured",),
    "stepscope._recording.capture.omissions": ("_prepared",),
    "stepscope._recording.instrument.no_step": ("_config", "_steps", "_count", "_added"),
    "stepscope._recording.instrument.patch": ("refusals",),
    "stepscope._recording.process.failures": ("_noted", "_warned"),
    "stepscope._recording.process.identity": ("_prepared_in",),
    "stepscope.engines.settings": ("_named",),
    "stepscope._recording.spans.redaction": ("hook",),
    "stepscope._recording.spans.wrapping": ("declared_roles",),
}
"""{module: variables that are restored after each test}."""


LASTING = {
    "stepscope-engine-loop",
    "stepscope-export",
    "stepscope-finish",
    "stepscope-hooks",
    "stepscope-loop",
    "stepscope-profiler",
    "stepscope-requests",
    "stepscope-rollout_0",
    "stepscope-sglang",
    "stepscope-vllm",
    "stepscope-vllm-llm",
}
"""Threads that may outlive a test: they end with the process, or with an engine."""
_ENDS_S = 5.0
"""Time that other threads and callbacks have to end after a test."""


@pytest.fixture(scope="module", autouse=True)
def state_is_put_back_after_each_file() -> Iterator[None]:
    """Restore `PROCESS_STATE` after a test file whose own fixtures may have changed it."""
    before = recording()
    with state_put_back():
        yield
    end_recorder(None)
    if left := left_behind(before):
        pytest.fail(f"the fixtures of the file left {', '.join(left)}. Fix: end them in the fixture")


@pytest.fixture(autouse=True)
def process_state_is_put_back() -> Iterator[None]:
    """Restore `PROCESS_STATE` after each test, and fail a test that leaves something open or changed."""
    before, running = surroundings(), recording()
    with state_put_back():
        yield
    end_recorder(before["the open capture"])
    after = surroundings()
    if after != before:
        changes = [
            f"{name}: {before[name]} -> {after[name]}" for name in after if after[name] != before[name]
        ]
        pytest.fail(f"the test changed {'; '.join(changes)}. Fix: undo it in the test")
    if left := left_behind(running):
        pytest.fail(f"the test left {', '.join(left)}. Fix: end them in the test")


def end_recorder(before: object) -> None:
    """End a flight recorder that the test started, which would record until the end of the process."""
    if (standing := sys.modules.get("stepscope._recording.recorder.standing")) is not None:
        recorder = standing.standing()
        if recorder is not None and recorder is not before:
            standing.stop()


def recording() -> dict[int, str]:
    """Return {id: name} of stepscope's threads and gc callbacks that must end with the test."""
    threads = {
        id(thread): f"the thread {thread.name}"
        for thread in threading.enumerate()
        if thread.is_alive() and thread.name.startswith("stepscope-") and thread.name not in LASTING
    }
    callbacks = {
        id(callback): f"the gc callback {name}"
        for callback in gc.callbacks
        if (name := getattr(callback, "__qualname__", ""))
        and (getattr(callback, "__module__", None) or "").startswith("stepscope")
    }
    return threads | callbacks


def left_behind(before: dict[int, str]) -> list[str]:
    """Return the names in `recording()` that are not in `before`, after some time for these to end."""
    left: list[str] = []
    for seconds in (0.1, _ENDS_S):
        until = time.monotonic() + seconds
        while left := [name for key, name in recording().items() if key not in before]:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        else:
            return []
        gc.collect()  # threads that end with their owner
    return sorted(left)


@contextmanager
def state_put_back() -> Iterator[None]:
    """Restore the variables of `PROCESS_STATE` to their earlier values and contents."""
    states = [
        (variables, name, variables[name], copy(variables[name]))
        for module, names in PROCESS_STATE.items()
        for variables in [vars(import_module(module))]
        for name in names
        if name in variables
    ]
    yield
    for variables, name, value, content in states:
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, (set, dict)):
            value.clear()
            value.update(content)
        variables[name] = value


def surroundings() -> dict[str, object]:
    """Return the state of the process that each test must leave unchanged."""
    from stepscope._recording.spans import slot
    from stepscope.backends.process_lock import PROCESS_LOCK

    return {
        "the open capture": slot.active,
        "the running profiler": PROCESS_LOCK.holder,
        "the working directory": os.getcwd(),
        "the environment": {
            name: value for name, value in os.environ.items() if name.startswith("STEPSCOPE")
        },
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the failed tests to a file for `dev.py`, which prints them at its end."""
    if file := os.environ.get("DEV_FAILED_TESTS"):
        failed = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
        lines = [*(report.nodeid for report in failed), *_crashes]
        Path(file).write_text("".join(f"{line}\n" for line in lines))


_crashes: list[str] = []
"""A line for each process of pytest-xdist that has died."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Note that a process died: some of its tests did not run."""
    if error:
        _crashes.append(f"a process of the tests died: {error}")


@cache
def needed_at_the_top(file: Path) -> set[str]:
    """Return the modules of `OPTIONAL` that a file imports outside of functions."""
    body = ast.parse(file.read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} & OPTIONAL
