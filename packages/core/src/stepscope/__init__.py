"""stepscope: see where every step of an RL post-training run goes."""

from __future__ import annotations

from stepscope.config import ProfileConfig
from stepscope.recording.capture import Capture, capture
from stepscope.recording.context import attach, carrier, span, trajectory, turn
from stepscope.recording.decorator import profile_step
from stepscope.recording.hooks import advance, flush, request_capture
from stepscope.recording.patch import instrument
from stepscope.recording.prepare import aprepare, prepare
from stepscope.recording.run import configure

__all__ = [
    "Capture",
    "ProfileConfig",
    "advance",
    "aprepare",
    "attach",
    "capture",
    "carrier",
    "configure",
    "flush",
    "instrument",
    "prepare",
    "profile_step",
    "request_capture",
    "span",
    "trajectory",
    "turn",
]
