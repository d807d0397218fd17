"""stepscope: see where every step of an RL post-training run goes.

What stands in the workers' code is imported at once: it is light. The rest, which reads configurations and
writes files, is imported when it is first asked for: a module that only decorates does not pay for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepscope.recording.context import attach, carrier, span, trajectory, turn
from stepscope.recording.decorator import profile_step
from stepscope.recording.hooks import (
    advance,
    consume,
    flush,
    on_artifact,
    on_capture,
    on_report,
    redact,
)

if TYPE_CHECKING:
    from stepscope.config import ProfileConfig
    from stepscope.recording.asking import request_capture
    from stepscope.recording.capture import Capture, capture
    from stepscope.recording.patch import instrument
    from stepscope.recording.prepare import aprepare, prepare
    from stepscope.recording.run import configure

    __version__: str

__all__ = [
    "Capture",
    "ProfileConfig",
    "advance",
    "aprepare",
    "attach",
    "capture",
    "carrier",
    "configure",
    "consume",
    "flush",
    "instrument",
    "on_artifact",
    "on_capture",
    "on_report",
    "prepare",
    "profile_step",
    "redact",
    "request_capture",
    "span",
    "trajectory",
    "turn",
]

_LATER = {
    "Capture": "stepscope.recording.capture",
    "ProfileConfig": "stepscope.config",
    "aprepare": "stepscope.recording.prepare",
    "capture": "stepscope.recording.capture",
    "configure": "stepscope.recording.run",
    "instrument": "stepscope.recording.patch",
    "prepare": "stepscope.recording.prepare",
    "request_capture": "stepscope.recording.asking",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("stepscope")
    elif name in _LATER:
        value = getattr(import_module(_LATER[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next look finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "__version__"})
