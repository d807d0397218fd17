"""stepscope: see where every step of an RL post-training run goes.

Names that code in workers uses, such as `profile_step`, are imported at once, because they are light. Other
names read configurations and write files. They are imported on first use, so that a module that only
decorates functions stays fast to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepscope._recording.session.hooks import (
    advance,
    consume,
    flush,
    on_artifact,
    on_report,
    redact,
    step_tokens,
)
from stepscope._recording.spans.api import profile_step, span, trajectory, turn
from stepscope._recording.spans.carrier import attach, carrier
from stepscope._recording.spans.scopes import Scope as Span

if TYPE_CHECKING:
    from stepscope._recording.capture.capture import Capture, capture
    from stepscope._recording.capture.configure import configure
    from stepscope._recording.capture.on_demand import request_capture
    from stepscope._recording.capture.prepare import aprepare, prepare
    from stepscope._recording.capture.result import CaptureResult, on_capture
    from stepscope._recording.instrument.patch import instrument
    from stepscope.config import ProfileConfig

    __version__: str

__all__ = [
    "Capture",
    "CaptureResult",
    "ProfileConfig",
    "Span",
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
    "step_tokens",
    "trajectory",
    "turn",
]

_LATER = {
    "Capture": "stepscope._recording.capture.capture",
    "CaptureResult": "stepscope._recording.capture.result",
    "ProfileConfig": "stepscope.config",
    "aprepare": "stepscope._recording.capture.prepare",
    "capture": "stepscope._recording.capture.capture",
    "configure": "stepscope._recording.capture.configure",
    "instrument": "stepscope._recording.instrument.patch",
    "on_capture": "stepscope._recording.capture.result",
    "prepare": "stepscope._recording.capture.prepare",
    "request_capture": "stepscope._recording.capture.on_demand",
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
    globals()[name] = value  # so that later accesses do not call `__getattr__`
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "__version__"})
