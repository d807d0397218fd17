"""Operators of the thread that opens a window, if the recording belongs to another thread.

torch_npu records the operators of the thread that starts it, and of threads that call
`enable_profiler_in_child_thread` (absent in the oldest versions). `disable_profiler_in_child_thread` leaves
the callback in place: a second recording would contain each operator of that thread twice, a third recording
three times. Only the stop in C++ removes the callback, and this stop ends the recording of all threads. So a
thread calls the stop once nothing records. Seen in torch_npu 2.13.0.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.torch.foreign_sessions import running
from stepscope.errors import ours
from stepscope_npu import _recordings
from stepscope_npu._versions import TorchNpu

log = logging.getLogger("stepscope")
_here = threading.local()


def join(torch_npu: TorchNpu, flags: Mapping[str, bool]) -> str | None:
    """Record the calling thread's operators too. Return the reason if that fails, else None.

    Args:
        flags: Arguments of `profile`. Only `record_shapes` and `profile_memory` are passed on, because the
            start has turned on stacks and modules for every thread.
    """
    ask = getattr(torch_npu.profiler.profile, "enable_profiler_in_child_thread", None)
    if ask is None:
        return (
            f"torch_npu {torch_npu.version} records the operators of its own thread alone, and this capture "
            "was not opened on the main thread. Device data and markers are recorded"
        )
    _here.joined = True
    ask(**{name: flags[name] for name in ("record_shapes", "profile_memory")})
    if running(on_this_thread=True):
        return None
    return "torch_npu did not take this thread into its recording. Its messages are on stdout"


def leave(torch_npu: TorchNpu) -> None:
    """Stop recording the calling thread's operators. Do nothing while a recording runs."""
    if not getattr(_here, "joined", False) or PROCESS_LOCK.holder is not None or _recordings.theirs_open:
        return
    _here.joined = False
    if not running(on_this_thread=True):
        return
    try:
        torch_npu.interface._stop_profiler()
    except ours() as error:
        log.warning("stepscope: torch_npu still watches %s: %s", threading.current_thread().name, error)


def forget() -> None:
    """Reset in the child of a fork, where a stop would wait for threads that do not exist."""
    _here.joined = False
