"""Commands that show their output or one line of progress. None of them outlives `dev.py`."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tools import repository

FAILED: list[str] = []
"""The failed commands, each followed by the names of its failed tests (conftest.py writes these)."""


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # no such program
        return False


def run(*command: str, **variables: str) -> bool:
    """Run a command on this terminal, and return whether it succeeded. The command handles Ctrl-C.

    Args:
        variables: Environment variables to add.
    """
    shown = "$ " + " ".join(word.replace(f"{repository.ROOT}/", "") for word in command)
    print(shown, flush=True)
    with tempfile.NamedTemporaryFile("r") as tests:
        environment = {**os.environ, **variables, "DEV_FAILED_TESTS": tests.name}
        process = subprocess.Popen(command, cwd=repository.ROOT, env=environment)
        interrupts: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            stop(process, process.send_signal)
        if interrupts:
            raise KeyboardInterrupt
        if code:
            FAILED.extend((shown, *(f"    {test}" for test in tests.read().splitlines())))
    return code == 0


def run_tests(*command: str, again: Sequence[str], **variables: str) -> bool:
    """Run pytest, then the failed tests once more by the command `again`. Return whether all passed.

    Print the tests that passed only in the second run. If a process of the tests died, there is no second
    run.
    """
    before = len(FAILED)
    if run(*command, **variables):
        return True
    failed = FAILED[before + 1 :]
    if not failed or any("a process of the tests died" in line for line in failed):
        return False
    del FAILED[before:]
    if not run(*again, "--last-failed", "--last-failed-no-failures=none", **variables):
        return False
    for test in failed:
        say(f"PASSED ONLY WHEN RUN AGAIN: {test.strip()}")
    return True


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes], send: Callable[[int], None]) -> None:
    """End `process` if it still runs. `send` sends a signal to the process, or to its group."""
    if process.poll() is None:
        send(signal.SIGINT)  # not SIGTERM: pip and pytest clean up after SIGINT
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            send(signal.SIGKILL)
            process.wait()


def narrate(what: str, command: Sequence[str]) -> str | None:
    """Run `command`, and show its duration and its last line of output on one line.

    Returns:
        The end of the output if the command failed, None if it succeeded.
    """
    tail: deque[str] = deque(maxlen=25)
    line = Line(what)
    with subprocess.Popen(
        command,
        cwd=repository.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, so that `stop` ends its children (venv runs ensurepip)
    ) as process:
        try:
            for text in ticks(process):
                if text and not text.startswith("Progress "):
                    tail.append(text)
                line.show(text)
            code = process.wait()
        finally:  # after Ctrl-C or SIGTERM, no installation may go on
            stop(process, lambda number: os.killpg(process.pid, number))
            line.end()
    return "\n".join((*tail, f"({' '.join(command)} exited with {code})")) if code else None


def ticks(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that `process` prints, and "" after each second without a line."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for text in process.stdout or ():
            lines.put(text.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            text = lines.get(timeout=1)
        except queue.Empty:
            text = ""
        if text is None:
            return
        yield text


class Line:
    """One line of progress: rewritten in place on a terminal, else a new line at most every ten seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = self.shown = time.monotonic()
        self.doing = ""
        self.terminal = sys.stdout.isatty()

    def show(self, text: str) -> None:
        portion = ""
        if text.startswith("Progress "):  # pip's raw progress: "Progress <bytes> of <bytes>"
            done, _, size = text[9:].partition(" of ")
            portion = f" {100 * int(done) // max(int(size), 1)} %"
        elif text:
            self.doing = text
        now = time.monotonic()
        if self.terminal or now - self.shown >= 10:
            self.shown = now
            self.put(f"  {now - self.started:4.0f} s  {self.what}: {self.doing}{portion}")

    def end(self) -> None:
        self.put(f"  {time.monotonic() - self.started:4.0f} s  {self.what}")
        if self.terminal:
            print(flush=True)

    def put(self, text: str) -> None:
        if self.terminal:
            columns = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: columns - 1]}", end="", flush=True)
        else:
            print(text[:160], flush=True)
