"""Recordings of torch_npu in this process, ours and others', watched where all of them meet C++.

torch_npu shows neither a recording that runs nor one that failed: two of them share one CANN recording and
one output folder without a word, and what `start` and `stop` raise inside is printed and dropped. So the five
functions through which `torch_npu.profiler.profiler_interface` reaches C++ are wrapped, once per process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepscope_npu._versions import TorchNpu

_CALLS = ("_init_profiler", "_warmup_profiler", "_start_profiler", "_stop_profiler", "_finalize_profiler")
_PATH_FIELDS = ("_dir_path", "_worker_name", "_export_only_mode")
"""What a handler sets."""
_MADE_IN = "_prof_path"
"""Where the last recording is made. A `_KinetoProfile` that is destructed deletes it in export-only mode."""

_ours_on: int | None = None
"""The thread that drives a recording of ours. One writer: `ours`."""
_theirs_open = False
"""Whether a recording of other code is open. One writer: the calls watched."""


class Calls:
    """The C++ calls of one recording of ours, and what they raised."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.errors: list[str] = []


_calls = Calls()


def watch(torch_npu: TorchNpu, before_theirs: Callable[[], None]) -> None:
    """Calls `before_theirs()` on the thread on which other code is about to open a recording.

    To be called once per process.
    """
    for name in _CALLS:
        original = getattr(torch_npu.interface, name, None)
        if original is not None:  # the oldest have no warm-up
            setattr(torch_npu.interface, name, _watched(name, original, before_theirs))


def _watched(
    name: str, original: Callable[..., Any], before_theirs: Callable[[], None]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if threading.get_ident() == _ours_on:
            return _call_ours(name, original, arguments)
        if name == "_init_profiler":
            before_theirs()
        result = original(*arguments)
        if name in ("_init_profiler", "_finalize_profiler"):
            _note_theirs(name == "_init_profiler")
        return result

    return call


def _call_ours(name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _calls.made.add(name)
    try:
        return original(*arguments)
    except Exception as error:
        _calls.errors.append(f"{name.strip('_')}: {error}")
        raise


def _note_theirs(is_open: bool) -> None:
    global _theirs_open
    _theirs_open = is_open


@contextmanager
def ours(calls: Calls) -> Iterator[None]:
    """Around everything that a recording of ours does. One at a time: the process lock is held."""
    global _ours_on, _calls
    _ours_on, _calls = threading.get_ident(), calls
    try:
        yield
    finally:
        _ours_on = None


def theirs_open() -> bool:
    return _theirs_open


def busy(torch_npu: TorchNpu) -> str | None:
    """Why no recording of ours can start; None when it can."""
    if _theirs_open or _paths(torch_npu).is_prof_inited:
        return "a torch_npu.profiler recording that is not stepscope's is open (running or warming up)"
    return None


class OutputFolder:
    """torch_npu's one output folder: whichever handler was made last owns it, for every recording.

    Ours takes it for a moment and gives it back, so that a profiler that the user has made and not started
    yet writes where the user said.
    """

    def __init__(self, torch_npu: TorchNpu) -> None:
        self._paths = _paths(torch_npu)
        self._before = {**self._now(), _MADE_IN: vars(self._paths).get(_MADE_IN)}
        self._ours: dict[str, object] = {}

    def taken(self) -> None:
        """Ours is made."""
        self._ours = self._now()

    def give_back(self) -> None:
        """Once ours is over. torch_npu's own mark of that is missing where finishing it has raised."""
        self._paths.is_prof_inited = False
        if self._now() == self._ours:  # else somebody has made a handler since
            vars(self._paths).update(self._before)

    def _now(self) -> dict[str, object]:
        fields = vars(self._paths)
        return {name: fields[name] for name in _PATH_FIELDS if name in fields}


def keep_open_for_theirs(torch_npu: TorchNpu) -> None:
    """Ending ours has marked the process as not recording, when theirs had just marked it."""
    _paths(torch_npu).is_prof_inited = True


def _paths(torch_npu: TorchNpu) -> Any:
    from torch_npu.profiler._profiler_path_creator import ProfPathCreator

    return ProfPathCreator()
