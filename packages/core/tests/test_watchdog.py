"""Watchdog of the flight recorder: stacks of a process in which C code holds the interpreter's lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import run
from stepscope.cli.running.why import ask
from stepscope.errors import RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.states import read_stacks

HEAD = """
import ctypes, faulthandler, os, select, sys, threading, time
from stepscope import capture, configure, profile_step, span
from stepscope.recording.recorder import standing, watchdog
seconds = float(sys.argv[2])
configure(save_path=sys.argv[1], record="spans", recorder={"watchdog_seconds": seconds},
          control={"poll_seconds": 0.05}, roles={"*": {"profiler": "off"}})

def ready():
    while seconds and not watchdog._is_set:
        time.sleep(0.01)  # its file is there a moment before it
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        pass  # a signal that comes just before a read without a limit is handled after it
    sys.stdin.readline()

"""
HELD = """
def hold():
    ctypes.PyDLL(None).sleep(300)

@profile_step("actor")
def update():
    ready()
    hold()

threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()
with capture(3), span("train", role="trainer"):
    update()
"""
HELD_FOR_A_WHILE = """
with capture(3):
    ready()
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # holds the lock until a line comes
    print("again", flush=True)
    sys.stdin.readline()
"""
HEALTHY = """
with capture(3):
    ready()
"""
OWN = """
own = open(sys.argv[1] + "/own", "w")
with capture(3):
    ready()
    faulthandler.dump_traceback_later(1, file=own)
    time.sleep(2)
    faulthandler.cancel_dump_traceback_later()
    ready()
"""
FORK = """
def hold_the_queue(held, until):
    with standing.standing()._work._changed:
        held.set()
        until.wait()

with capture(3):
    ready()
    held, until = threading.Event(), threading.Event()
    threading.Thread(target=hold_the_queue, args=(held, until)).start()
    held.wait()
    child = os.fork()
    if not child:
        sys.exit(7)  # the interpreter's end waits for faulthandler's thread
    until.set()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Program:
    """A program that records, and waits for a line at `ready`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.layout = RunLayout(folder)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def sizes(self) -> list[int]:
        """Return the number of lines of each file of stacks."""
        return [len(path.read_bytes().splitlines()) for path in self.layout.stacks()]

    def stand_still(self) -> None:
        """Have it go on, and return when it has left its stacks."""
        until(lambda: self.sizes() == [1])
        self.go_on()
        until(lambda: self.sizes() > [1])

    def end(self) -> int:
        self.process.communicate("\n", timeout=60)
        return self.process.returncode


@contextmanager
def running(code: str, folder: Path, seconds: float) -> Iterator[Program]:
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + code, str(folder), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPSCOPE_RUN_ID": "feed0003"},
    )
    program = Program(process, folder)
    try:
        assert program.read() == "ready"
        yield program
    finally:
        process.kill()
        process.communicate()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def culprit(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["why", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    call: dict[str, Any] = answer["calls"][answer["culprits"][0]]
    return call


def test_the_call_that_holds_the_lock_is_named_in_two_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(HELD, tmp_path, 0.5) as program:
        program.stand_still()
        began = time.monotonic()
        assert ask(program.layout, 10) == []
        took = time.monotonic() - began
        call = culprit(tmp_path, capsys)
        assert run(["why", str(tmp_path)]) == 0
        text = " ".join(capsys.readouterr().out.split())
    assert took < 2
    assert (call["held"], call["gone"], call["role"]) == (True, False, "trainer")
    assert call["where"].startswith("hold at <string>:")
    assert "Waits for no other call: trainer_" in text
    assert "Python stands still since" in text


def test_a_killed_process_keeps_its_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(HELD, tmp_path, 2) as program:
        program.stand_still()
    call = culprit(tmp_path, capsys)
    assert call["gone"]
    assert call["where"].startswith("hold at <string>:")


def test_stacks_go_when_python_runs_again(tmp_path: Path) -> None:
    with running(HELD_FOR_A_WHILE, tmp_path, 0.5) as program:
        program.stand_still()
        program.go_on()
        assert program.read() == "again"
        until(lambda: program.sizes() == [1])


def test_a_healthy_run_leaves_no_file(tmp_path: Path) -> None:
    with running(HEALTHY, tmp_path, 0.5) as program:
        until(lambda: program.sizes() == [1])
        assert program.end() == 0
    assert not program.layout.stacks()


def test_a_process_that_is_terminated_leaves_no_file(tmp_path: Path) -> None:
    with running(HEALTHY, tmp_path, 5) as program:
        until(lambda: program.sizes() == [1])
        program.process.terminate()
        program.process.wait(30)
    assert not program.layout.stacks()


def test_zero_seconds_set_no_watchdog(tmp_path: Path) -> None:
    with running(HELD, tmp_path, 0) as program:
        program.go_on()
        time.sleep(1)
        assert not program.layout.stacks()


def test_a_watchdog_of_the_program_is_left_alone(tmp_path: Path) -> None:
    with running(OWN, tmp_path, 0.5) as program:
        until(lambda: program.sizes() == [1])
        program.go_on()
        assert program.read() == "ready"
        assert "Timeout (0:00:01)!" in (tmp_path / "own").read_text()
        assert program.end() == 0


def test_a_forked_child_ends(tmp_path: Path) -> None:
    with running(FORK, tmp_path, 5) as program:
        until(lambda: program.sizes() == [1])
        program.go_on()
        assert program.read() == "7"


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"format": 1}\n'])
def test_a_file_without_stacks_has_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_bytes(content)
    assert read_stacks(path) is None


def test_a_file_with_another_first_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_bytes(b"nonsense\nTimeout (0:00:01)!\n")
    with pytest.raises(RecordError):
        read_stacks(path)
