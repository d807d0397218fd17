"""Causes of the end of a vLLM recording, and their reports."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest.records import ProcessPart
from stepscope.files.sidecar import ProcessInfo
from stepscope_vllm._capture.late_files import runs_that_are_over
from stepscope_vllm._capture.outcome import Ending, ending_of
from stepscope_vllm._driving.engine_calls import EngineCalls
from stepscope_vllm._driving.in_process import stop_frontend
from stepscope_vllm._files import engine_folder, traces


def ending(
    recorded: int | None,
    *,
    asked: int | None = None,
    early: bool = False,
    ran: int | None = None,
    expired: str | None = None,
    certain: bool = True,
) -> Ending:
    return ending_of(recorded=recorded, asked=asked, early=early, ran=ran, expired=expired, certain=certain)


def test_our_stop_ends_what_nothing_else_has() -> None:
    assert ending(9) == Ending("capture", None, None)


def test_fewer_iterations_than_asked_for_are_noted() -> None:
    ended = ending(9, asked=50)
    assert (ended.ended, ended.truncated) == ("capture", None)
    assert str(ended.note).startswith("9 of 50 ")


def test_a_count_that_is_reached_ends_it() -> None:
    assert ending(4, asked=4, early=True, ran=40) == Ending("count", None, None)


def test_a_budget_ends_it() -> None:
    why = "open for more than 3 s"
    assert ending(4, asked=8, expired=why) == Ending("budget", why, None)


def test_somebody_elses_stop_cuts_it_short_with_numbers() -> None:
    ended, truncated, note = ending(8, asked=16, early=True, ran=16)
    assert (ended, note) == ("others", None)
    assert truncated is not None
    assert re.findall(r"\d+", truncated) == ["8", "16", "8"]


def test_somebody_elses_stop_behind_the_last_iteration_is_a_note() -> None:
    ended, truncated, note = ending(8, early=True, ran=8)
    assert (ended, truncated) == ("others", None)
    assert note is not None
    assert note.endswith("ran no more")


def test_nobody_is_blamed_where_the_engine_may_end_recordings_itself() -> None:
    assert ending(8, early=True, ran=16, certain=False) == Ending(None, None, None)


def a_trace(folder: Path, name: str, iterations: int) -> Path:
    """As torch writes it, with its own marks last."""
    step = '{"ph": "X", "name": "execute_context_0(0)_generation_1(1)", "ts": 1000.5}, '
    marks = '{"name": "Iteration Start: PyTorch Profiler", "ts": 1000.5},'
    marks += '{"name": "Record Window End", "ts": 9000.25}'
    text = '{"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [' + step * iterations + marks + "]}"
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_a_trace_says_how_many_iterations_it_has_and_when_its_recording_ended(tmp_path: Path) -> None:
    trace = traces.read(a_trace(tmp_path, "p_rank0.1.pt.trace.json.gz", 50_000))
    assert trace.iterations == 50_000
    assert trace.window == (1_700_000_000_001_000_500, 1_700_000_000_009_000_250)


def test_an_engine_writes_until_its_table_is_whole(tmp_path: Path) -> None:
    name = "p_rank0.17.pt.trace.json.gz"
    for file, at_s in ((name, 10), ("p_rank0.profiler_out.txt", 20), ("p_rank1.profiler_out.txt", 30)):
        (tmp_path / file).write_text("")
        os.utime(tmp_path / file, (at_s, at_s))
    changed = engine_folder.changed_ns(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert engine_folder.whole_ns(changed, f"capture_{name}") == 20 * 10**9


def test_tables_of_older_releases_belong_to_their_rank(tmp_path: Path) -> None:
    name = "abc-rank-1.17.pt.trace.json.gz"
    for file, at_s in ((name, 10), ("profiler_out_1.txt", 20), ("profiler_out_0.txt", 30)):
        (tmp_path / file).write_text("")
        os.utime(tmp_path / file, (at_s, at_s))
    changed = engine_folder.changed_ns(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert engine_folder.whole_ns(changed, name) == 20 * 10**9


# The AsyncLLM's own profiler, where it does not stop: the capture goes on and says what is missing.


class Frontend:
    """A stand-in for the torch session of `AsyncLLM.profiler`: it records, and its stop raises."""

    kineto_results = None
    entered = True

    def stop(self) -> None:
        raise OSError(28, "No space left on device")


def stopped(profiler: object) -> str | None:
    async def work() -> str | None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        engine = SimpleNamespace(
            output_handler=task,
            vllm_config=None,
            errored=False,
            engine_core=SimpleNamespace(resources=None),
            profiler=SimpleNamespace(profiler=profiler, stop=getattr(profiler, "stop", None)),
        )
        calls = EngineCalls(engine)
        calls.bind(asyncio.get_running_loop())
        try:
            return await stop_frontend(calls)
        finally:
            task.cancel()

    return asyncio.run(work())


def test_a_frontend_that_does_not_stop_is_named_with_its_reason() -> None:
    reason = str(stopped(Frontend()))
    assert "AsyncLLM's own" in reason
    assert "No space left" in reason


def test_of_a_frontend_that_does_not_record_nothing_is_said() -> None:
    idle = Frontend()
    idle.entered = False
    assert stopped(idle) is None


# Owners of files in an engine's folder that no capture fetched.


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
