"""Stacks that this process leaves when its Python stands still: C code holds the interpreter's lock.

The watchdog is faulthandler's: a thread in C, which needs no lock. The recorder's watching thread sets it
anew as long as it runs. There is one in a process, so one that the program sets has precedence.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import ours
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import StacksHead
from stepscope.recording.process import failures

_PART = 0.2
"""The watchdog is set anew after this part of its time: it costs the start of a thread."""
_LATE_S = 1.0
"""Time in which the program's own watchdog writes its stacks on a busy machine."""
_lock = threading.RLock()
"""Held while the watchdog is set, and by a fork: its child would wait for a thread that it does not have."""
_is_set = False
"""True while the watchdog is ours. Writers: `_set` and `_unset`."""
_taken_until = 0.0
"""Monotonic time until which the program's own watchdog may run. One writer: `_noting`."""
_originals: dict[str, Callable[..., Any]] = {}
"""Functions of faulthandler that note what the program sets. Writers: `_note_others`, `_note_no_others`."""


class Watchdog:
    """The watchdog of this process, and its file, which holds one line until stacks follow."""

    def __init__(self, layout: RunLayout, process: ProcessInfo, run_id: str, seconds: float) -> None:
        """Args:
        seconds: Time without Python after which it writes the stacks.
        """
        self._layout = layout
        self._run_id = run_id
        self._path = layout.stacks_of(process.key, run_id)
        head = StacksHead(process=process, run_id=run_id, seconds=seconds)
        self._head = msgspec.json.encode(head) + b"\n"
        self._seconds = seconds
        self._due = 0.0
        self._file: int | None = None
        self._is_closed = False

    def alive(self) -> None:
        """Note that Python runs. Stacks that were written meanwhile are old, and go."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _PART * self._seconds
        with _lock:
            if self._is_closed or now < _taken_until:
                return
            try:
                _set(self._seconds, self._open())
            except ours(OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                self._is_closed = True
                failures.note("the watchdog of the flight recorder", error)

    def rest(self) -> None:
        """Remove the file of a process that is told to end. One that goes on is watched again later."""
        with _lock:
            self._due = time.monotonic() + self._seconds
            _unset()
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
                with suppress(OSError):
                    self._path.unlink()

    def close(self, workers: Iterable[str]) -> None:
        """End it and remove its file, and those of workers that have left no stacks.

        Args:
            workers: `ProcessInfo.key` of those that may be killed before they remove theirs.
        """
        with _lock:
            self._is_closed = True
            self.rest()
            _note_no_others()
        for key in workers:
            _remove_empty(self._layout.stacks_of(key, self._run_id))

    def _open(self) -> int:
        """Return the file with its first line alone."""
        if self._file is not None:
            state = os.fstat(self._file)
            if state.st_nlink:
                if state.st_size > len(self._head):
                    os.ftruncate(self._file, len(self._head))
                return self._file
            os.close(self._file)  # somebody removed it
            self._file = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = os.open(self._path, flags, 0o600)
        os.write(self._file, self._head)
        return self._file


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        if path.read_bytes().count(b"\n") <= 1:
            path.unlink()


def _set(seconds: float, file: int) -> None:
    global _is_set
    _note_others()
    _originals["dump_traceback_later"](seconds, file=file)
    _is_set = True


def _unset() -> None:
    global _is_set
    if _is_set:
        _is_set = False
        _originals["cancel_dump_traceback_later"]()


def _note_others() -> None:
    """From now on, note when the program itself sets the watchdog."""
    if not _originals:
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            _originals[name] = getattr(faulthandler, name)
            setattr(faulthandler, name, _noting(name))


def _note_no_others() -> None:
    for name, original in _originals.items():
        setattr(faulthandler, name, original)
    _originals.clear()


def _noting(name: str) -> Callable[..., object]:
    original = _originals[name]

    @wraps(original)
    def note(*args: Any, **kwargs: Any) -> object:
        global _is_set, _taken_until
        with _lock:
            result = original(*args, **kwargs)
            _is_set = False
            _taken_until = 0.0 if name.startswith("cancel") else _end_of(*args, **kwargs)
        return result

    return note


def _end_of(timeout: float, repeat: bool = False, *_: object, **__: object) -> float:
    return inf if repeat else time.monotonic() + timeout + _LATE_S


def _before_fork() -> None:
    _lock.acquire()
    _unset()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _lock.release(), after_in_child=_in_child)
