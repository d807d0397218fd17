"""Owners of files in an engine's folder that no capture fetched."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest.records import ProcessPart
from stepscope.files.sidecar import ProcessInfo
from stepscope_vllm._capture.late_files import runs_that_are_over

NOW = ClockAnchor(wall_ns=1, mono_ns=1, raw_ns=1, uncertainty_ns=0)
PART = ProcessPart(
    run_id="run1",
    step=2,
    process=ProcessInfo(role="trainer", rank=0, world_size=None, host=socket.gethostname(), pid=os.getpid()),
    owner=True,
    opened=NOW,
    closed=NOW,
    recorded=True,
    why="",
)


def part(**changes: Any) -> ProcessPart:
    process = {name: changes.pop(name) for name in ("pid", "host") if name in changes}
    return msgspec.structs.replace(PART, process=msgspec.structs.replace(PART.process, **process), **changes)


def test_files_of_a_capture_that_is_over_are_taken() -> None:
    assert runs_that_are_over([part(), part(owner=False, pid=1)]) == {"run1"}


def test_files_of_a_capture_that_another_process_still_holds_stay() -> None:
    """Each rank that opens captures of its own has a replica 0, and they share the engine's folder."""
    assert runs_that_are_over([part(closed=None)]) == set()
    assert runs_that_are_over([part(closed=None, host="elsewhere", pid=999_999_999)]) == set()


def test_files_that_may_be_of_either_of_two_processes_stay() -> None:
    assert runs_that_are_over([part(), part(pid=1)]) == set()


def test_files_of_a_process_that_is_gone_are_taken() -> None:
    assert runs_that_are_over([part(closed=None, pid=999_999_999)]) == {"run1"}


def test_a_step_that_was_captured_twice_by_one_process_has_one_owner() -> None:
    assert runs_that_are_over([part(), part()]) == {"run1"}
