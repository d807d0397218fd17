"""A rollout in simulated time: asyncio with tools, engines and slots, whose clock jumps to the next event.

Run it with and without a cause. The difference is what that cause costs, and owes nothing to a report.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import Advice, StepReport, step_report
from stepscope_report.timeline import Timeline, load_step

MS = 1_000_000
Time = Callable[[int, int], float]
"""Milliseconds of a trajectory's turn."""


class _Clock(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(timeout or 0.0, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


@dataclass
class _Record:
    process: FakeProcess
    stage: str
    role: str
    above: _Record | None
    more: dict[str, Any]
    start_ns: int
    end_ns: int = 0
    number: int = 0


@dataclass(kw_only=True)
class Rollout:
    """Trajectories of some turns. Each turn waits for a slot of its replica, generates, and calls a tool."""

    trajectories: int = 8
    turns: int = 3
    replicas: int = 2
    slots: int = 100
    """Requests that a replica serves at once."""
    at_once: int = 100
    """Trajectories at once."""
    begin_ms: Callable[[int], float] = lambda number: 0
    prepare_ms: Time = lambda number, turn: 0
    """Before its request, in no span of its own."""
    prefill_ms: Time = lambda number, turn: 10
    decode_ms: Time = lambda number, turn: 50
    tool_ms: Time = lambda number, turn: 0
    tool: Callable[[int, int], str | None] = lambda number, turn: None
    score_ms: Callable[[int], float] = lambda number: 0
    """After its turns, in a span of role `reward`."""
    wall_ns: int = 0
    """Its duration."""
    _records: list[_Record] = field(default_factory=list, init=False)

    def report(self, root: Path) -> StepReport:
        return step_report(self.timeline(root))

    def timeline(self, root: Path) -> Timeline:
        """Play it, and return a step that is nothing else."""
        folder = StepFolder(root)
        self._driver = folder.process("trainer", owner=True)
        self._replicas = [folder.process("rollout", number) for number in range(self.replicas)]
        loop = _Loop()
        try:
            loop.run_until_complete(self._run())
        finally:
            loop.close()
        for record in self._records:
            above = record.above
            beside = above is not None and above.process is not record.process
            record.number = record.process.span(
                record.stage, record.start_ns, record.end_ns, role=record.role,
                parent=None if above is None or beside else above.number,
                link=above.process.link(above.number) if above is not None and beside else None,
                **record.more,
            )  # fmt: skip
        for process in folder.processes:
            process.close(self.wall_ns)
        return load_step(folder.write())

    def advice(self, root: Path) -> dict[str, Advice]:
        return {advice.rule: advice for advice in self.report(root).advice}

    async def _run(self) -> None:
        self._places = asyncio.Semaphore(self.at_once)
        self._slots = [asyncio.Semaphore(self.slots) for _ in range(self.replicas)]
        await asyncio.gather(*map(self._play, range(self.trajectories)))
        self.wall_ns = _now_ns()

    async def _play(self, number: int) -> None:
        await _pass(self.begin_ms(number))
        async with self._places:
            more = {"trajectory": f"t{number}"}
            with self._span(self._driver, "trajectory", "agent_loop", None, more) as above:
                for turn in range(self.turns):
                    await self._turn(number, turn, above, more)
                if self.score_ms(number):
                    with self._span(self._driver, "score", "reward", above, more):
                        await _pass(self.score_ms(number))

    async def _turn(self, number: int, turn: int, above: _Record, more: dict[str, Any]) -> None:
        replica = number % self.replicas
        process = self._replicas[replica]
        await _pass(self.prepare_ms(number, turn))
        with self._span(process, "queue", "rollout", above, more):
            await self._slots[replica].acquire()
        with self._span(process, "prefill", "rollout", above, more):
            await _pass(self.prefill_ms(number, turn))
        tokens = {"attrs": {"tokens": round(self.decode_ms(number, turn))}}
        with self._span(process, "decode", "rollout", above, {**more, **tokens}):
            await _pass(self.decode_ms(number, turn))
        self._slots[replica].release()
        name = self.tool(number, turn)
        named = {} if name is None else {"attrs": {"name": name}}
        with self._span(self._driver, "tool", "env", above, {**more, **named}):
            await _pass(self.tool_ms(number, turn))

    @contextmanager
    def _span(
        self, process: FakeProcess, stage: str, role: str, above: _Record | None, more: dict[str, Any]
    ) -> Iterator[_Record]:
        record = _Record(process, stage, role, above, more, _now_ns())
        self._records.append(record)
        yield record
        record.end_ns = _now_ns()


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e6) * 1000


async def _pass(ms: float) -> None:
    await asyncio.sleep(ms / 1000)
