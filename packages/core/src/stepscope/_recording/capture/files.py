"""The files of one capture, which all its processes write."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stepscope._recording.process import private_loop
from stepscope.files.manifest_parts import read_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope._recording.fanout.participants import Participants
    from stepscope._recording.session.session import Session
    from stepscope.files.manifest import Manifest


class CapturedFiles:
    """The files of a capture, for its owner. Methods block, and may be called from any thread."""

    def __init__(self, session: Session, participants: Participants | None) -> None:
        self.session = session
        self._participants = participants
        self._gathering = threading.Lock()

    @property
    def apart(self) -> list[str]:
        """Names of the workers whose files are fetched after the close, because their hosts do not share this
        folder.
        """
        return [] if self._participants is None else self._participants.apart

    def manifest(self) -> Manifest:
        """Return the current manifest, combined from the parts of all processes."""
        return self.session.manifest_part.manifest(self.session.layout)

    def fold(self) -> None:
        """Write `manifest.json` again. A disk error is recorded and not raised."""
        self.session.manifest_part.fold(self.session.layout)

    def unfinished(self) -> bool:
        """Return True if another process (a worker, or another rank of torchrun) is still recording or
        writing.

        The answer comes from files, because a busy process would not answer a call.
        """
        own = self.session.manifest_part.record
        lost = {absent.process for absent in own.absent}
        return any(
            item.pending in ("exporting", "closing")
            for part in read_parts(self.session.layout)[0]
            if part.run_id == own.run_id and part.process != own.process and part.process.key not in lost
            for item in part.expected
        )

    def await_others(self, left_s: Callable[[], float], pause: Callable[[], object], *, drain: bool) -> None:
        """See `ClosedCapture`."""
        if drain and self._participants is not None and self._participants.fleet is not None:
            private_loop.run(self._participants.fleet.drain(max(0.0, left_s())))
        self.gather(left_s)
        while left_s() > 0 and self.unfinished():
            pause()

    def gather(self, left_s: Callable[[], float]) -> None:
        """Fetch the files of the workers in `apart`.

        If another thread is fetching, the call only waits for that thread. A later call fetches the remaining
        files.
        """
        participants = self._participants
        if participants is None or participants.fleet is None or not participants.apart:
            return
        if not self._gathering.acquire(timeout=max(0.0, left_s())):
            return  # another thread is still fetching
        try:
            private_loop.run(participants.gather(left_s))
            self.fold()
        finally:
            self._gathering.release()
