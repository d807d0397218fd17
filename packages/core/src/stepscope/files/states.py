"""States of processes: the calls that each is in at one moment, for `stepscope why`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.files.clock import Int
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink
from stepscope.files.storage.reading import read_record


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span that has not ended."""

    span: Int
    parent: Int | None = None
    """The span above it in the same process."""
    link: SpanLink | None = None
    """The span above it in another process."""
    role: str
    stage: str
    age_ns: Int
    trajectory: str | None = None
    turn: Int | None = None
    thread: Int
    """Native id of the thread that opened it."""
    waits: bool = False
    """True if its stage only waits."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a Python stack."""

    file: str
    line: Int
    function: str


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """One Python thread."""

    id: Int
    """Native id."""
    name: str
    frames: tuple[Frame, ...]
    """The innermost first."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One asyncio task that is not done."""

    name: str
    frames: tuple[Frame, ...]
    """Of its coroutines, the innermost first."""
    awaits: str
    """The object that the innermost coroutine awaits, as text."""
    span: Int | None = None
    """The innermost span of the task. None: none, or unknown (Python before 3.12)."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment."""

    format: Int = 1
    process: ProcessInfo
    run_id: str
    at_ns: Int
    """Unix ns."""
    step: Int | None
    """The step that runs, in the process that bounds steps."""
    step_age_ns: Int | None = None
    workers: dict[str, str] = {}
    """{`ProcessInfo.key`: name} of the workers that this process expects to answer."""
    spans: tuple[OpenSpan, ...]
    threads: tuple[Thread, ...]
    tasks: tuple[Task, ...]


def read_state(path: Path) -> ProcessState:
    """Return a state.

    Raises:
        OSError: The file cannot be read.
        RecordError: It is no state.
    """
    return read_record(path, ProcessState)
