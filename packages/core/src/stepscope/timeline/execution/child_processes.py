"""An `Executor` whose workers are child processes of their own: one that dies costs its call alone.

The children are plain `python -c` processes. `multiprocessing` is not used: a fork would copy the caller's
threads, a spawn would run its script again, and the death of one worker breaks the pool.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, ParamSpec, TypeVar, cast

from stepscope.timeline.execution.calls import WorkerDiedError, answer_to, call_of, result_of

CODE = "from stepscope.timeline.execution.child_processes import serve; serve()"
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ChildProcesses(Executor):
    """Up to `count` child processes, each started with its first call.

    A function is one of a module that a child can import. Its annotated types are those of msgspec.
    """

    def __init__(self, count: int, command: list[str] | None = None) -> None:
        """`command`: Of a child. None: this interpreter, or this process if that cannot be started."""
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="stepscope-child")
        command = command or command_of(CODE)
        self._children = [_Child(command) for _ in range(count)]
        self._free: SimpleQueue[_Child] = SimpleQueue()
        for child in self._children:
            self._free.put(child)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function in a child. Its arguments are positional."""
        if kwargs:
            raise TypeError(f"{fn} is called with {', '.join(kwargs)}; give positional arguments")
        return self._threads.submit(self._run, cast(Callable[..., _T], fn), args)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the children once their calls are done; at once if `cancel_futures`."""
        if cancel_futures:
            self.kill()
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            for child in self._children:
                child.end()

    def kill(self) -> None:
        """Kill all children, and let no further call start one."""
        for child in self._children:
            child.give_up()

    def _run(self, fn: Callable[..., _T], args: tuple[object, ...]) -> _T:
        child = self._free.get()
        try:
            return child.call(fn, args)
        finally:
            self._free.put(child)


class _Child:
    """One child process, replaced by a new one if it died."""

    def __init__(self, command: list[str] | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def call(self, fn: Callable[..., _T], args: tuple[object, ...]) -> _T:
        if self._over:
            raise WorkerDiedError("its process was ended")
        try:
            call = call_of(fn, args)
            process = self._process or self._start()
        except (UnicodeEncodeError, OSError):  # a file's name is no UTF-8, or no process can be started
            return fn(*args)
        if process is None or process.stdin is None or process.stdout is None:
            return fn(*args)
        try:
            _send(process.stdin, call)
            answer = _receive(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            self.end()
            raise WorkerDiedError(f"its process ended with code {process.returncode}")
        return result_of(answer, fn)

    def give_up(self) -> None:
        """Kill the process while another thread waits for its answer."""
        self._over = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Close the pipes of the process, which ends it, and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # it died with a call unread
                if pipe is not None:
                    pipe.close()
        process.wait()

    def _start(self) -> subprocess.Popen[bytes] | None:
        if self._command is not None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._over:  # it was given up meanwhile
                self._process.kill()
        return self._process


def serve() -> None:
    """Run a child: take calls from stdin and write answers to stdout until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then ends this process
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a reader prints is no answer
        while (call := _receive(sys.stdin.buffer)) is not None:
            _send(answers, answer_to(call))


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "big") + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message. None: the other end is closed."""
    size = pipe.read(8)
    message = pipe.read(int.from_bytes(size, "big")) if len(size) == 8 else b""
    return message if len(size) == 8 and len(message) == int.from_bytes(size, "big") else None


def command_of(code: str) -> list[str] | None:
    """Return the command of a child that runs `code`. None: no interpreter can be started.

    An embedded interpreter may have no executable. The executable of a frozen application is the application,
    which would start again.
    """
    if not sys.executable or hasattr(sys, "frozen"):
        return None
    # Imports ignore entries that are no text, such as a `Path`. ASCII works in any locale.
    path = ascii(list(filter(_is_text, sys.path)))
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"]


def _is_text(entry: object) -> bool:
    return isinstance(entry, str)
