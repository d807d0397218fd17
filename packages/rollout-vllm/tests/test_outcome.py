"""Tests of the cause of a vLLM recording's end, and of the report about it."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope_vllm._capture.collection import ending_of
from stepscope_vllm._driving.engine_calls import EngineCalls
from stepscope_vllm._driving.in_process import stop_frontend
from stepscope_vllm._files import engine_folder, traces


@pytest.mark.parametrize(
    ("recorded", "given", "ended", "truncated", "note"),
    [
        (9, {}, "capture", None, None),
        (9, {"asked": 50}, "capture", None, ["9", "50"]),
        (4, {"asked": 4, "early": True, "ran": 40}, "count", None, None),
        (4, {"asked": 8, "expired": "open for more than 3 s"}, "budget", ["3"], None),
        (8, {"asked": 16, "early": True, "ran": 16}, "others", ["8", "16", "8"], None),
        (8, {"early": True, "ran": 8}, "others", None, ["8"]),
        (8, {"early": True, "ran": 16, "certain": False}, None, None, None),  # the engine may have ended it
    ],
)
def test_what_ended_a_recording_is_told_with_its_numbers(
    recorded: int,
    given: dict[str, Any],
    ended: str | None,
    truncated: list[str] | None,
    note: list[str] | None,
) -> None:
    usual = {"asked": None, "early": False, "ran": None, "expired": None, "certain": True}
    told = ending_of(recorded=recorded, **{**usual, **given})
    numbers = [None if text is None else re.findall(r"\d+", text) for text in (told.truncated, told.note)]
    assert (told.ended, *numbers) == (ended, truncated, note)


def a_trace(folder: Path, name: str, iterations: int) -> Path:
    """Write a trace as torch does, with the events of its begin and end last."""
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


@pytest.mark.parametrize(
    ("name", "tables", "shown"),
    [
        ("p_rank0.17.pt.trace.json.gz", ("p_rank0.profiler_out.txt", "p_rank1.profiler_out.txt"), "capture_"),
        ("abc-rank-1.17.pt.trace.json.gz", ("profiler_out_1.txt", "profiler_out_0.txt"), ""),
    ],
    ids=["newer", "older"],
)
def test_an_engine_writes_until_the_table_of_its_rank_is_whole(
    tmp_path: Path, name: str, tables: tuple[str, str], shown: str
) -> None:
    for at_s, file in zip((10, 20, 30), (name, *tables), strict=True):
        (tmp_path / file).write_text("")
        os.utime(tmp_path / file, (at_s, at_s))
    changed = engine_folder.changed_ns(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert engine_folder.whole_ns(changed, f"{shown}{name}") == 20 * 10**9


# If the AsyncLLM's own profiler does not stop, the capture goes on and says what is missing.


class Frontend:
    """A stand-in for the torch session of `AsyncLLM.profiler`, which records, and whose stop raises."""

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
