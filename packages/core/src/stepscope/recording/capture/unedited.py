"""Captures of steps in a loop that nobody edits. `instrument/step_boundaries.py` opens and closes them."""

from __future__ import annotations

from stepscope.recording.capture import prepare
from stepscope.recording.capture.capture import Capture, capture_unedited, opened
from stepscope.recording.instrument import step_boundaries
from stepscope.recording.instrument.step_boundaries import StepCapture
from stepscope.recording.spans import slot


class UneditedCapture:
    """A capture that prepares its program first, because no line of the loop calls `prepare`."""

    def __init__(self, capture: Capture, workers: object, role: str) -> None:
        self.capture = capture
        self._workers = workers
        self._role = role

    def open(self) -> None:
        """See `StepCapture`."""
        prepare.before_first_step(self.capture.config, self._workers, self._role)
        self.capture.open()

    async def aopen(self) -> None:
        """See `StepCapture`."""
        await prepare.abefore_first_step(self.capture.config, self._workers, self._role)
        await self.capture.aopen()

    def close(self, error: str | None) -> None:
        """See `StepCapture`."""
        self.capture.close(error=error)

    async def aclose(self, error: str | None) -> None:
        """See `StepCapture`."""
        await self.capture.aclose(error=error)


def new_capture(
    number: int, workers: object, role: str, closing: StepCapture | None
) -> UneditedCapture | None:
    """Return a capture of step `number`, to open.

    None while another capture than `closing` records this process: the user's, or that of a worker's owner.
    """
    other = opened()
    if other is None and slot.active is not None:
        return None
    if other is not None and not (isinstance(closing, UneditedCapture) and closing.capture is other):
        return None
    return UneditedCapture(capture_unedited(number, workers=workers, role=role), workers, role)


step_boundaries.new_capture = new_capture
