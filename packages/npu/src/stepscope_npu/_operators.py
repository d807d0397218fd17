"""Operators of the thread that opens a window, where the recording is another thread's.

torch_npu records the operators of the thread that starts it, and of threads that ask to be recorded too
(`enable_profiler_in_child_thread`; the oldest have no such thing). Its counterpart `disable_...` leaves the
callback where it is, so that a second recording would hold each operator of that thread twice, a third one
three times. What takes the callback away as well is C++'s stop, which ends the recording for everyone: so a
thread leaves once nothing records. Seen on 2.13.0.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.torch.foreign_sessions import running
from stepscope_npu import _recordings
from stepscope_npu._versions import TorchNpu

log = logging.getLogger("stepscope")
_here = threading.local()


def join(torch_npu: TorchNpu, flags: Mapping[str, bool]) -> str | None:
    """Has the calling thread's operators recorded too; why they are not, or None.

    Args:
        flags: Arguments of `profile`. Stacks and modules come by Python's own hook, which the start has set
            in every thread.
    """
    ask = getattr(torch_npu.profiler.profile, "enable_profiler_in_child_thread", None)
    if ask is None:
        return (
            f"torch_npu {torch_npu.version} records the operators of the thread that starts it alone, and "
            "this capture was not opened on the main thread. Device data and markers are there"
        )
    _here.joined = True
    ask(**{name: flags[name] for name in ("record_shapes", "profile_memory")})
    if running(on_this_thread=True):
        return None
    return "torch_npu did not take this thread into its recording. Its messages are on stdout"


def leave(torch_npu: TorchNpu) -> None:
    """The calling thread is recorded no longer, if it was. While anything records it stays as it is."""
    if not getattr(_here, "joined", False) or PROCESS_LOCK.holder is not None or _recordings.theirs_open():
        return
    _here.joined = False
    if not running(on_this_thread=True):
        return
    try:
        torch_npu.interface._stop_profiler()
    except Exception as error:
        log.warning("stepscope: torch_npu goes on watching %s: %s", threading.current_thread().name, error)


def forget() -> None:
    """In the child of a fork, where a stop would wait for threads that are not there."""
    _here.joined = False
