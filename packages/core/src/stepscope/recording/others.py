"""The other processes of a capture: its workers and its engines, started and stopped all at once."""

from __future__ import annotations

import asyncio

from stepscope.config import ProfileConfig
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import Absent
from stepscope.recording.engine_group import EngineGroup, profilers_of
from stepscope.recording.fleet_port import Fleet, WorkerOutcome, load_fleet
from stepscope.recording.ledger import Ledger
from stepscope.recording.worker import StartRequest, StopRequest


class Others:
    """What becomes of each worker and each replica goes into the owner's ledger; nothing is raised for
    one.
    """

    def __init__(self, workers: object, engines: object) -> None:
        """Raises ConfigError or EngineError for workers or engines that nothing installed knows."""
        self.profilers = [] if engines is None else profilers_of(engines)
        recorded = [worker for profiler in self.profilers for worker in profiler.workers]
        self.fleet: Fleet | None = None
        if workers is not None or recorded:
            self.fleet = load_fleet(workers, recorded)
        self._group: EngineGroup | None = None
        self._ledger: Ledger | None = None

    def join(self, ledger: Ledger, layout: StepLayout, config: ProfileConfig) -> None:
        """Ties them to one session's ledger."""
        part = ledger.part
        self._ledger = ledger
        self._group = EngineGroup(
            self.profilers,
            config=config,
            layout=layout,
            ledger=ledger,
            step=part.step,
            name=f"step_{part.step:06d}_{part.run_id}",
        )

    async def start(self, request: StartRequest, deadline_s: float) -> None:
        """Returns when every one has begun, failed, or used up its deadline."""
        ledger, group = self._joined()
        await asyncio.gather(self._start_workers(ledger, request, deadline_s), group.start(deadline_s))

    async def stop(self, request: StopRequest, deadline_s: float) -> None:
        """Stops those that began, those that may have, and those that answered too late."""
        ledger, group = self._joined()
        await asyncio.gather(self._stop_workers(ledger, request, deadline_s), group.stop(deadline_s))

    async def _start_workers(self, ledger: Ledger, request: StartRequest, deadline_s: float) -> None:
        if self.fleet is not None:
            outcomes = await self.fleet.start(request, deadline_s)
            ledger.update(began={each.process: each.name for each in outcomes if each.process is not None})
            _enter(ledger, outcomes)

    async def _stop_workers(self, ledger: Ledger, request: StopRequest, deadline_s: float) -> None:
        if self.fleet is not None:
            _enter(ledger, await self.fleet.stop(request, deadline_s))

    def _joined(self) -> tuple[Ledger, EngineGroup]:
        if self._ledger is None or self._group is None:
            raise RuntimeError("Others.join comes first")
        return self._ledger, self._group


def _enter(ledger: Ledger, outcomes: list[WorkerOutcome]) -> None:
    ledger.add_absent(
        tuple(
            Absent(
                name=outcome.name, state=outcome.state, reason=outcome.reason or "", process=outcome.process
            )
            for outcome in outcomes
            if outcome.state != "ok"
        )
    )
    ledger.add_clocks(tuple(outcome.clock for outcome in outcomes if outcome.clock is not None))
