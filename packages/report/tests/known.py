"""Random steps of several hosts with known true times, for tests of merge and report.

A step has a driver, an agent loop with overlapping trajectories, rollout replicas, and actor ranks that
reduce (NCCL) while they update. Clocks are skewed and drift, and the owner measures them over paths that take
longer in one direction. The same seed gives the same step, also with perfect clocks on one host.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from packages.report.tests.traces import put
from stepscope.files.spans import SpanLink
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder

MS = 1_000_000
BASE_NS = OPENED_NS - 7_889_238_000_000_000 // 2
"""The zero of times in traces: like Kineto's, months before the step."""


class Clock(NamedTuple):
    """The clock of one host, against true time."""

    skew_ns: int
    """The lead of its wall clock at the opening."""
    drift_ppm: int
    """The rate at which its wall clock and its monotonic clock gain."""
    way_ns: int
    """Duration of an exchange with it, all of it in one direction. Half of it is the error of the sample, and
    the uncertainty that the sample states. 0: it was not measured.
    """


class Known(NamedTuple):
    """A span or event of the files, in true time: ns after the capture opened."""

    process: str
    """`ProcessInfo.key`."""
    name: str
    start_ns: int
    end_ns: int


class KnownStep:
    """One step and its truth. `write` puts it on disk."""

    def __init__(
        self,
        seed: int,
        clocks: tuple[Clock, ...],
        *,
        lasted_ns: int = 20_000 * MS,
        numbered: bool = True,
        shifted: int = 0,
        killed: str | None = None,
    ) -> None:
        """Describe a step. The driver and the agent loop share a host; the others are on those of `clocks`.

        Args:
            numbered: True if torch numbered the collectives. Without numbers all ranks record the same ones;
                with numbers each rank lacks some at its ends.
            shifted: The number of collectives that the second host's ranks missed at the beginning, and all
                others at the end: as many on all, and not the same ones.
            killed: The role whose processes never closed the capture.
        """
        self._seed = seed
        self._clocks = clocks
        self._lasted_ns = lasted_ns
        self._numbered = numbered
        self._shifted = shifted
        self._killed = killed
        self.spans: list[Known] = []
        """All spans by process, in the order of opening."""
        self.events: list[Known] = []
        """All events of traces; each name occurs once."""

    def write(self, save_path: str | os.PathLike[str], *, perfect: bool = False) -> Path:
        """Write the step and return its folder.

        Args:
            perfect: Use one host with one clock. `spans` and `events` are the same either way.
        """
        self.spans, self.events = [], []
        self._chance = random.Random(self._seed)
        self._folder = StepFolder(save_path)
        self._hosts = [Clock(0, 0, 0)] * len(self._clocks) if perfect else list(self._clocks)
        self._perfect = perfect
        driver = self._folder.process("trainer", owner=True, host="host-0")
        loop = self._folder.process("agent_loop", host="host-0")
        replicas = [self._process("rollout", rank, rank) for rank in range(2)]
        actors = [self._process("actor", rank, None) for rank in range(2 * len(self._clocks))]
        others = [*replicas, *actors]
        self._exchange(driver, others)
        half_ns = self._lasted_ns // 2
        self._rollout(driver, loop, replicas, half_ns)
        self._update(driver, actors, half_ns)
        for process in self._folder.processes:
            if process.info.role != self._killed:
                process.close(self._lasted_ns)
        self.spans.sort(key=lambda known: [p.info.key for p in self._folder.processes].index(known.process))
        return self._folder.write()

    def _process(self, role: str, rank: int, replica: int | None) -> FakeProcess:
        number = rank % len(self._clocks)
        skew_ns, drift_ppm, _ = self._hosts[number]
        host = "host-0" if self._perfect else f"host-{number + 1}"
        return self._folder.process(
            role, rank, host=host, skew_ns=skew_ns, drift_ppm=drift_ppm, mono_ppm=drift_ppm, replica=replica
        )

    def _exchange(self, driver: FakeProcess, others: list[FakeProcess]) -> None:
        """Measure clocks shortly before the opening and some time after the closing, as captures do."""
        chance = random.Random(self._seed)  # the rest of the step is the same whatever was measured
        for at_ns in (-80 * MS, self._lasted_ns + 900 * MS):
            for process in others:
                way_ns = self._hosts[(process.info.rank or 0) % len(self._clocks)].way_ns
                if way_ns:
                    error_ns = chance.choice((-1, 1)) * (way_ns // 2)
                    driver.measures(process, at_ns, uncertainty_ns=way_ns // 2, error_ns=error_ns)

    def _span(
        self, process: FakeProcess, stage: str, start_ns: int, end_ns: int, *, parent: int | None = None,
        link: SpanLink | None = None, trajectory: str | None = None, turn: int | None = None,
    ) -> int:  # fmt: skip
        self.spans.append(Known(process.info.key, stage, start_ns, end_ns))
        return process.span(
            stage, start_ns, end_ns, parent=parent, link=link, trajectory=trajectory, turn=turn
        )

    def _rollout(
        self, driver: FakeProcess, loop: FakeProcess, replicas: list[FakeProcess], until_ns: int
    ) -> None:
        """Add trajectories of turns. Each turn has a call to a replica and perhaps a tool call."""
        rollout = self._span(driver, "rollout", 5 * MS, until_ns)
        for number in range(12):
            name, start_ns = f"t{number}", self._chance.randrange(10 * MS, until_ns // 4)
            end_ns = self._chance.randrange(until_ns // 2, until_ns - 10 * MS)
            root = self._span(
                loop, "trajectory", start_ns, end_ns, link=driver.link(rollout), trajectory=name
            )
            edges = sorted(self._chance.randrange(start_ns, end_ns) for _ in range(6))
            for turn, (from_ns, to_ns) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
                at = self._span(loop, "turn", from_ns, to_ns, parent=root, trajectory=name, turn=turn)
                middle_ns = self._chance.randint(from_ns, to_ns)
                self._span(
                    self._chance.choice(replicas), "generate", (3 * from_ns + middle_ns) // 4, middle_ns,
                    link=loop.link(at), trajectory=name, turn=turn,
                )  # fmt: skip
                if self._chance.random() < 0.5:
                    self._span(loop, "tool", middle_ns, to_ns, parent=at, trajectory=name, turn=turn)

    def _update(self, driver: FakeProcess, actors: list[FakeProcess], from_ns: int) -> None:
        """Let each rank compute and reduce in turn; a reduction ends for all once the last has entered it."""
        self._span(driver, "update", from_ns, self._lasted_ns - 5 * MS)
        rounds = 60
        each_ns = (self._lasted_ns - from_ns - 20 * MS) // rounds
        begun_ns = [from_ns + self._chance.randrange(5 * MS) for _ in actors]
        at_ns = list(begun_ns)
        kernels: list[list[dict[str, object]]] = [[] for _ in actors]
        for number in range(rounds):
            computed_ns = [ns + self._chance.randrange(each_ns // 4, each_ns // 2) for ns in at_ns]
            together_ns = max(computed_ns) + self._chance.randrange(20_000, 60_000)
            for rank, actor in enumerate(actors):
                left_ns = together_ns + self._chance.randrange(15_000)
                kernels[rank].append(
                    self._kernel(actor, f"gemm {number} of {rank}", at_ns[rank], computed_ns[rank])
                )
                kernels[rank].append(
                    self._reduction(actor, number, rank, computed_ns[rank], left_ns, len(actors))
                )
                at_ns[rank] = left_ns
        for rank, actor in enumerate(actors):
            self._span(actor, "update_actor", begun_ns[rank], at_ns[rank] + 2 * MS)
            lacks = 2 * (self._chance.randrange(4) if self._numbered else self._shifted)
            late = rank % 2 == 1 if self._numbered else rank % len(self._clocks) == 1
            recorded = kernels[rank][lacks:] if late else kernels[rank][: 2 * rounds - lacks]
            self._trace(actor, recorded, len(actors))

    def _kernel(
        self, process: FakeProcess, name: str, start_ns: int, end_ns: int, **args: object
    ) -> dict[str, object]:
        """Return a kernel as Kineto writes one: us by the host's clock."""
        wall_ns, until_ns = process.wall_ns(start_ns), process.wall_ns(end_ns)
        self.events.append(Known(process.info.key, name, start_ns, end_ns))
        return {
            "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7,
            "ts": msgspec.Raw(b"%d.%03d" % divmod(wall_ns - BASE_NS, 1000)),
            "dur": msgspec.Raw(b"%d.%03d" % divmod(until_ns - wall_ns, 1000)), "args": args,
        }  # fmt: skip

    def _reduction(
        self, process: FakeProcess, number: int, rank: int, start_ns: int, end_ns: int, ranks: int
    ) -> dict[str, object]:
        args: dict[str, object] = {
            "Collective name": "allreduce", "In msg nelems": 1000 + number, "dtype": "Float",
            "Process Group Name": "0", "Process Group Ranks": str(list(range(ranks))),
        }  # fmt: skip
        if self._numbered:
            args["Seq"] = 100 + number
        name = f"ncclDevKernel_AllReduce_Sum_f32_RING_LL {number} of {rank}"
        return self._kernel(process, name, start_ns, end_ns, **args)

    def _trace(self, process: FakeProcess, events: list[dict[str, object]], ranks: int) -> None:
        info = process.info
        group = {"pg_name": "0", "backend_config": "cuda:nccl", "ranks": list(range(ranks))}
        trace = {
            "distributedInfo": {"backend": "nccl", "rank": info.rank, "pg_config": [group]},
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": events,
        }
        put(self._folder, f"traces/{info.role}/rank{info.rank}.json", process, msgspec.json.encode(trace))


def some_clocks(seed: int, *, measured: bool = True) -> Iterator[Clock]:
    """Yield the clocks of three hosts: one far ahead, one with the largest drift, one random."""
    chance = random.Random(seed)
    for skew_ns, drift_ppm in (
        (11_560 * MS, 0),
        (-3_000 * MS, chance.choice((-200, 200))),
        (chance.randrange(-MS, MS), chance.randrange(-100, 100)),
    ):
        yield Clock(skew_ns, drift_ppm, chance.randrange(100_000, 2 * MS) if measured else 0)
