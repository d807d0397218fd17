"""State that the child of a fork forgets, in one order.

The files, threads and captures of a process belong to that process. A forked child records nothing, and must
neither write its parent's files nor wait for threads that it does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files.storage import reading

TABLE: dict[str, Callable[[], None] | None] = dict.fromkeys(
    (
        "private loop",  # has no thread in the child
        "flight recorder",
        "visits",
        "capture",  # switched off before anything else looks at it
        "exporter",
        "hooks and programs",
        "late stops of engines",
        "step of the framework",
        "request listener",
        "step durations",
        "counters",
        "connection to Ray",
        "native id of the thread",
    )
)
"""{name: function that resets state}, in the order of the calls. None until its module is imported.

One writer: `forgets`.
"""


def forgets(name: str, forget: Callable[[], None]) -> None:
    """Register `forget` to be called in every forked child, at its place in `TABLE`."""
    if name not in TABLE:
        raise ValueError(f"{name!r} is not in fork.TABLE: {', '.join(TABLE)}. Fix: add it where it is due")
    TABLE[name] = forget


def _in_child() -> None:
    failures.renew_lock()
    reading.renew_lock()
    for name, forget in TABLE.items():
        if forget is None:
            continue
        try:
            forget()
        except ours() as error:
            failures.note(f"forgetting the {name} of the parent process", error)


os.register_at_fork(after_in_child=_in_child)
