"""Captures of an unedited training loop, which `instrument/step_boundaries.py` opens and closes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope._recording.capture import configure, prepare
from stepscope._recording.capture.capture import Capture, opened
from stepscope._recording.instrument import no_step
from stepscope._recording.instrument.step_boundaries import StepCapture
from stepscope._recording.spans import slot
from stepscope.engines import local_engines

if TYPE_CHECKING:
    from stepscope._recording.fanout.unedited_engines import UneditedEngines


class UneditedCapture:
    """A `StepCapture` that first prepares the program, because its code does not call `prepare`."""

    def __init__(self, capture: Capture, workers: object, engines: UneditedEngines | None, role: str) -> None:
        self.capture = capture
        self._workers = workers
        self._engines = engines
        self._role = role

    @property
    def blocks(self) -> bool:
        """See `StepCapture`."""
        return self._workers is not None or self._engines is not None

    def open(self) -> None:
        if self._engines is not None and self._asks_engines():
            self._engines.number()
        prepare.before_first_step(self.capture.config, self._workers, _profilers(self._engines), self._role)
        self.capture.open()

    async def aopen(self) -> None:
        if self._engines is not None and self._asks_engines():
            await self._engines.anumber()
        profilers = _profilers(self._engines)
        await prepare.abefore_first_step(self.capture.config, self._workers, profilers, self._role)
        await self.capture.aopen()

    def close(self, error: str | None) -> None:
        self.capture.close(error=error)

    async def aclose(self, error: str | None) -> None:
        await self.capture.aclose(error=error)

    def _asks_engines(self) -> bool:
        return self.capture.selected or prepare.is_due(self.capture.config)


def failed(error: Exception) -> None:
    """Record an error that prevented the capture of a step."""
    no_step.failed(error)


def new_capture(
    number: int, workers: object, groups: Mapping[str, object], role: str, closing: StepCapture | None
) -> UneditedCapture | None:
    """Return a new capture of step `number`.

    Return None if a capture other than `closing` records this process: one that the user's code opened, or
    one in which this process is a worker.
    """
    other = opened()
    if other is None and slot.session() is not None:
        return None
    if other is not None and not (isinstance(closing, UneditedCapture) and closing.capture is other):
        return None
    engines = _engines(groups)
    capture = Capture(number, workers, _profilers(engines), None, role, None, "instrument")
    return UneditedCapture(capture, workers, engines, role)


def _engines(groups: Mapping[str, object]) -> UneditedEngines | None:
    """Return the engines to record, or None if there are none."""
    config = configure.current()
    match = config.role("rollout")
    if match is None or not match[1].engine.profiler or not (groups or local_engines.registered()):
        return None
    # Imported here, because the module imports asyncio.
    from stepscope._recording.fanout.unedited_engines import UneditedEngines

    engines = UneditedEngines(groups, config)
    return engines if engines.profilers else None


def _profilers(engines: UneditedEngines | None) -> object:
    return None if engines is None else engines.profilers
