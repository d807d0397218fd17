"""The process-wide slot: the session that records this process now, or None.

Profilers are process-wide, so the slot is too. `recording.capture` is its only writer. Everyone else reads it
through the module (`slot.active`), never by importing the name: cloudpickle copies a global by value and a
copy would never switch on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.recording.session.session import Session

active: Session | None = None
