"""All recordings of torch_npu in this process, watched at their calls into C++.

torch_npu does not report whether a recording runs or has failed. Two recordings silently share one CANN
recording and one output folder, and errors in `start` and `stop` are printed and dropped. So this module
wraps, once per process, the functions by which `torch_npu.profiler.profiler_interface` calls C++.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepscope_npu._versions import TorchNpu

_CALLS = ("_init_profiler", "_warmup_profiler", "_start_profiler", "_stop_profiler", "_finalize_profiler")
_PATH_FIELDS = ("_dir_path", "_worker_name", "_export_only_mode")
"""Fields of torch_npu's output folder that a trace handler sets."""
_MADE_IN = "_prof_path"
"""Field with the folder of the last recording. In export-only mode, the destructor of a `_KinetoProfile`
deletes this folder."""

_ours_on: int | None = None
"""The thread that is driving a recording of stepscope, or None. One writer: `ours`."""
theirs_open = False
"""True while a recording of other code is open. One writer: the watched calls."""


class Calls:
    """The C++ calls of one recording of stepscope, and their errors."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.errors: list[str] = []


_calls = Calls()


def watch(torch_npu: TorchNpu, before_theirs: Callable[[], None]) -> None:
    """Wrap the C++ calls, and call `before_theirs()` whenever other code is about to start a recording.

    Call `watch` once per process. `before_theirs` runs on the thread that starts the recording.
    """
    for name in _CALLS:
        original = getattr(torch_npu.interface, name, None)
        if original is not None:  # the oldest versions have no warm-up
            setattr(torch_npu.interface, name, _watched(name, original, before_theirs))


def _watched(
    name: str, original: Callable[..., Any], before_theirs: Callable[[], None]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        global theirs_open
        if threading.get_ident() == _ours_on:
            return _call_ours(name, original, arguments)
        if name == "_init_profiler":
            before_theirs()
        result = original(*arguments)
        if name in ("_init_profiler", "_finalize_profiler"):
            theirs_open = name == "_init_profiler"
        return result

    return call


def _call_ours(name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _calls.made.add(name)
    try:
        return original(*arguments)
    except Exception as error:
        _calls.errors.append(f"{name.strip('_')}: {error}")
        raise


@contextmanager
def ours(calls: Calls) -> Iterator[None]:
    """Mark the C++ calls in this block as made by stepscope. The caller holds the process lock."""
    global _ours_on, _calls
    _ours_on, _calls = threading.get_ident(), calls
    try:
        yield
    finally:
        _ours_on = None


def busy(torch_npu: TorchNpu) -> str | None:
    """Return the reason why no recording can start now, or None if one can."""
    if theirs_open or _paths(torch_npu).is_prof_inited:
        return "a torch_npu.profiler recording that is not stepscope's is open (running or warming up)"
    return None


class OutputFolder:
    """torch_npu's only output folder, which each new trace handler sets for all recordings.

    A window sets the folder, and restores it when the recording ends. A profiler that the user has made but
    not started then still writes to the user's folder.
    """

    def __init__(self, torch_npu: TorchNpu) -> None:
        self._paths = _paths(torch_npu)
        self._before = {**self._now(), _MADE_IN: vars(self._paths).get(_MADE_IN)}
        self._ours: dict[str, object] = {}

    def taken(self) -> None:
        """Remember the values that stepscope's handler has set. `give_back` restores only these."""
        self._ours = self._now()

    def give_back(self) -> None:
        """Restore the previous values. Clear `is_prof_inited`, which torch_npu leaves set after an error."""
        self._paths.is_prof_inited = False
        if self._now() == self._ours:  # else other code has made a handler meanwhile
            vars(self._paths).update(self._before)

    def _now(self) -> dict[str, object]:
        fields = vars(self._paths)
        return {name: fields[name] for name in _PATH_FIELDS if name in fields}


def keep_open_for_theirs(torch_npu: TorchNpu) -> None:
    """Set `is_prof_inited` again for a recording of other code, since the end of a window has cleared it."""
    _paths(torch_npu).is_prof_inited = True


def _paths(torch_npu: TorchNpu) -> Any:
    from torch_npu.profiler._profiler_path_creator import ProfPathCreator

    return ProfPathCreator()
