"""Sessions whose files may still come: their stops failed, or not all ranks of a pipeline wrote in time."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope_sglang._capture.session import Session

log = logging.getLogger("stepscope")
_owed: deque[Session] = deque(maxlen=16)
"""One writer: this module, under `_entering`."""
_entering = threading.RLock()


def owe(session: Session) -> None:
    """Keep a session, so that the next capture or the end of this process publishes its files."""
    with _entering:
        if not _owed:
            atexit.unregister(hand_in_late)
            atexit.register(hand_in_late)
        _owed.append(session)


def owed_by(engine: object) -> list[Session]:
    """Return the kept sessions of an engine, in the order in which they ended."""
    return [session for session in tuple(_owed) if session.target.engine == engine]


def hand_in_late() -> None:
    """Publish files that came after their captures. An error of one session does not stop the others."""
    with _entering:
        for session in tuple(_owed):
            try:
                if not session.hand_in():
                    _owed.remove(session)
            except Exception as error:  # the next capture tries again
                step = session.recording.capture.step
                log.warning("stepscope: could not publish late files of step %d: %s", step, error)
