"""A sound step for tests of advice, and changes after which a rule of advice speaks."""

from __future__ import annotations

from pathlib import Path

from packages.report.tests.steps import MS
from stepscope.files.manifest import OwnCost
from stepscope.testing.steps import StepFolder
from stepscope_report import Advice, step_report
from stepscope_report.timeline import load_step, load_traces


class Case:
    """A step of 1000 ms: rollout to 500 ms, update on four actors from 500 to 950 ms. Nothing to advise."""

    def __init__(self, root: Path, *, cost_ms: int = 0, update: bool = True) -> None:
        self.folder = StepFolder(root)
        self.driver = self.folder.process("trainer", owner=True, cost=OwnCost(start_ns=cost_ms * MS))
        self.replica = self.folder.process("rollout", 0)
        self.actors = [self.folder.process("actor", rank) for rank in range(4)]
        self.driver.span("rollout", 0, 500 * MS, role="agent_loop")
        if update:
            for actor in self.actors:
                actor.span("update_actor", 500 * MS, 950 * MS)

    def trajectories(self, ends_ms: list[int], **parts: tuple[int, int]) -> None:
        """Trajectories from 0 on; `parts` are stages (role `rollout`, or `env`) from and to, in each."""
        for index, end in enumerate(ends_ms):
            name = f"t{index}"
            above = self.driver.span("trajectory", 0, end * MS, role="agent_loop", trajectory=name)
            for stage, (start, until) in parts.items():
                role = "env" if stage == "tool" else "rollout"
                link = self.driver.link(above)
                self.replica.span(stage, start * MS, until * MS, role=role, trajectory=name, link=link)

    def advice(self, *, traces: bool = False) -> dict[str, Advice]:
        for process in self.folder.processes:
            process.close(1000 * MS)
        path = self.folder.write()
        timeline = load_step(path)
        report = step_report(timeline, load_traces(path, timeline) if traces else None)
        return {advice.rule: advice for advice in report.advice}


def other_host(case: Case) -> None:
    case.folder.process("critic", 0, host="elsewhere").span("update_critic", 0, MS)


def late_trajectories(case: Case) -> None:
    case.trajectories([300] * 18 + [450, 500], decode=(0, 300))


def slow_rank(case: Case) -> None:
    save = case.driver.span("save", 952 * MS, 998 * MS)
    for rank, actor in enumerate(case.actors):
        actor.span("save", 952 * MS, (998 if rank == 2 else 962) * MS, link=case.driver.link(save))


def queue(case: Case) -> None:
    case.trajectories([500] * 10, queue=(0, 150), decode=(150, 500))


def tools(case: Case) -> None:
    case.trajectories([500] * 10, decode=(0, 300), tool=(300, 500))


def prompts(case: Case) -> None:
    case.trajectories([500] * 10, prefill=(0, 200), decode=(200, 500))


def weights(case: Case) -> None:
    case.replica.span("load_weights", 880 * MS, 1000 * MS)
