"""Reset of state in a forked child, in a fixed order.

The files and captures of a process belong to that process. A forked child records nothing. It must not write
its parent's files, nor wait for threads, which a fork does not copy.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files import storage

TABLE: dict[str, Callable[[], None] | None] = dict.fromkeys(
    (
        "private loop",  # a forked child does not have the loop's thread
        "flight recorder",
        "visits",
        "capture",  # recording is switched off first
        "exporter",
        "hooks and programs",
        "late stops of engines",
        "step of the framework",
        "request listener",
        "step durations",
        "counters",
        "connections of the parent",
        "native id of the thread",
    )
)
"""{name: function that resets state, or None until its module is imported}, in the order of the calls.

One writer: `forgets`.
"""


def forgets(name: str, forget: Callable[[], None]) -> None:
    """Register a function to call in every forked child, at the place of `name` in `TABLE`."""
    if name not in TABLE:
        raise ValueError(f"{name!r} is not in fork.TABLE: {', '.join(TABLE)}. Fix: add it where it is due")
    TABLE[name] = forget


def _in_child() -> None:
    failures.renew_lock()
    storage.renew_lock()
    for name, forget in TABLE.items():
        if forget is None:
            continue
        try:
            forget()
        except ours() as error:
            failures.note(f"forgetting the {name} of the parent process", error)


os.register_at_fork(after_in_child=_in_child)


def native_id_of(thread: threading.Thread) -> int:
    """Return the kernel's id of a thread. (In a forked child, `Thread.native_id` is still the id of the
    parent's thread.)
    """
    is_main = thread is threading.main_thread() and sys.platform == "linux"
    return os.getpid() if is_main else thread.native_id or 0
