"""An `Executor` whose workers are child processes of their own: one that dies costs its call alone.

The children are plain `python -c` processes. `multiprocessing` is not used: a fork would copy the caller's
threads, a spawn would run its script again, and the death of one worker breaks the pool. Calls and results
are JSON of the types in the function's annotations, so nothing is unpickled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import IO, ParamSpec, TypeVar, cast, get_type_hints

import msgspec

from stepscope.timeline.children import command_of

CODE = "from stepscope.timeline.execution.child_processes import serve; serve()"
_P = ParamSpec("_P")
_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class WorkerDiedError(BrokenExecutor):
    """The process that ran a call ended without a result, or had no memory for it."""


class WorkerFailedError(RuntimeError):
    """A call raised an exception, whose traceback is the message."""


class _Call(msgspec.Struct):
    module: str
    name: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(_encode(None))
    errno: int | None = None
    file: bytes | None = None
    """Of an `OSError`, like `errno`."""
    memory: bool = False
    """True: the call raised MemoryError."""
    traceback: str | None = None


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
            call = _encode(_Call(fn.__module__, fn.__qualname__, msgspec.Raw(_encode(args))))
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
        return cast(_T, _result_of(answer, fn))

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
            _send(answers, _encode(_answer(msgspec.json.decode(call, type=_Call))))


def _answer(call: _Call) -> _Answer:
    try:
        fn = getattr(import_module(call.module), call.name)
        hints = get_type_hints(fn)
        types = tuple(kind for name, kind in hints.items() if name != "return")
        count = len(msgspec.json.decode(call.arguments))
        args = msgspec.json.decode(call.arguments, type=tuple[types[:count]])  # type: ignore[misc] # made here
        return _Answer(result=msgspec.Raw(_encode(fn(*args))))
    except MemoryError:
        return _Answer(memory=True)
    except OSError as error:
        file = None if error.filename is None else os.fsencode(error.filename)
        return _Answer(errno=error.errno, file=file, traceback=str(error))
    except Exception:
        import traceback

        return _Answer(traceback=traceback.format_exc())


def _result_of(text: bytes, fn: Callable[..., object]) -> object:
    answer = msgspec.json.decode(text, type=_Answer)
    if answer.memory:
        raise WorkerDiedError("its process had too little memory")
    if answer.errno is not None:
        name = None if answer.file is None else os.fsdecode(answer.file)
        raise OSError(answer.errno, os.strerror(answer.errno), name)
    if answer.traceback is not None:
        raise WorkerFailedError(answer.traceback)
    return msgspec.json.decode(answer.result, type=get_type_hints(fn)["return"])


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "big") + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message. None: the other end is closed."""
    size = pipe.read(8)
    message = pipe.read(int.from_bytes(size, "big")) if len(size) == 8 else b""
    return message if len(size) == 8 and len(message) == int.from_bytes(size, "big") else None
