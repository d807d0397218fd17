"""`unreached_<run>.json`: a run whose configuration says where steps begin, and in which none ever did."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import Int
from stepscope.files.layout import RunLayout
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import read_record


class Unreached(msgspec.Struct, frozen=True, kw_only=True):
    """Written at the end of the program by the process that was started first."""

    format: Int = 1
    run_id: str
    at_ns: Int
    """Unix ns."""
    host: str
    pid: Int
    command: tuple[str, ...]
    boundaries: tuple[str, ...]
    """Each function that was to begin a step, and what became of it."""
    unasked: bool = False
    """Whether Ray was there and had ended when it was to say what hosts with folders of their own did."""

    error: str | None = None
    """`ExceptionType: message` of the exception that ended the program before its first step."""

    def __str__(self) -> str:
        if self.error is not None:
            return f"no step began, and none was captured: the program ended before, with {self.error}"
        where = " that is known here (Ray could not be asked what its hosts did)" if self.unasked else ""
        return (
            f"no step began{where}, and none was captured: {'; '.join(self.boundaries)}. "
            "Fix: if the program failed, that first; else under `instrument` name a function that the loop "
            "calls once a step ({module, name, step: around}), or the preset of the framework that it is; "
            "docs/frameworks.md"
        )


def write_unreached(run: RunLayout, record: Unreached) -> None:
    write_atomic(run.unreached(record.run_id), msgspec.json.format(msgspec.json.encode(record)))


def read_unreached(run: RunLayout) -> list[Unreached]:
    """Those of all runs in the folder, by time; what cannot be read is left out."""
    found = []
    for path in run.all_unreached():
        with suppress(OSError, RecordError):
            found.append(read_record(path, Unreached))
    return sorted(found, key=lambda record: record.at_ns)
