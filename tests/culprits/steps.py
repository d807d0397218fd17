"""Slow steps of real processes, each with the culprit that was planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from stepscope_report.suspects import CauseKind
from tests.culprits.plan import REGULAR, Plan, own_clock

WITHIN = 0.05
"""A number is right if it differs from the planted time by at most this part."""


class SlowStep(NamedTuple):
    """A culprit of a program, and the cause that the report has to name."""

    name: str
    program: str
    kind: CauseKind | None = None
    """None if nothing is wrong."""
    process: str | None = None
    """Role and rank, or host; empty if several are as slow, and None where any may stand."""
    stage: str | None = None
    trajectory: str = ""
    """End of its name; empty for any, or none."""


RANKS, RAY, AHEAD = "ranks", "on_ray", "ahead"
SLOW_STEPS = [
    SlowStep("late rank", RANKS, "late-rank", "actor 2", "load_batch"),
    SlowStep("late rank of DDP", RANKS, "late-rank", "actor 2"),
    SlowStep("slow data loader", RANKS, "slow-stage", "", "load_batch"),
    SlowStep("uneven batches", RANKS, "uneven-batch", "actor 3", "forward"),
    SlowStep("garbage collector", RANKS, "gc", "actor 1", "update"),
    SlowStep("slow shared folder", RANKS, "slow-storage", "", "save"),
    SlowStep("checkpoint between steps", RANKS, "between-steps"),
    SlowStep("skipped collective", RANKS, "skipped-collective", "actor 1", "all_reduce"),
    SlowStep("equal ranks", RANKS),
    SlowStep(REGULAR, RANKS),
    SlowStep("slow rank", RAY, "slow-rank", "actor 1", "update"),
    SlowStep("slow host", RAY, "slow-host", "host-b", "update"),
    SlowStep("slow tool", RAY, "slow-tool", "agent_loop 0", "search", "t3"),
    SlowStep("long trajectory", RAY, "long-trajectory", None, "decode", "t3"),
    SlowStep("queue before the tools", RAY, "queue", None, "queue"),
    SlowStep("preemption", RAY, "preemption", "rollout 0", "decode"),
    SlowStep("slow weight transfer", RAY, "weight-sync", "rollout 0", "sync_weights"),
    SlowStep("blocked event loop", RAY, "event-loop", "agent_loop 0", "compute_reward"),
    SlowStep("equal trajectories", RAY),
    SlowStep("slow tool of a rollout ahead", AHEAD, "slow-tool", None, "search", "t3"),
    SlowStep("stage of one step", AHEAD, "slow-stage", "trainer None", "export"),
    SlowStep("equal rollouts ahead", AHEAD),
]


class Verdict(NamedTuple):
    """A step's cause beside what was planted in it."""

    kind: bool
    process: bool
    stage: bool
    number: bool
    """True if the time by which the culprit was longer is right."""
    line: str

    @property
    def is_named(self) -> bool:
        return self.kind and self.process and self.stage

    @property
    def is_right(self) -> bool:
        return self.is_named and self.number


def run_steps(slow: SlowStep, folder: Path, runs: int) -> list[Verdict]:
    """Run the program of a culprit and judge what the report says of each step that has it."""
    folder.mkdir()
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    words = [sys.executable, "-W", "ignore", "-m", f"tests.culprits.{slow.program}", str(folder), slow.name]
    program = subprocess.run(
        [*words, str(runs)], capture_output=True, text=True, env=environment, check=False
    )
    if program.returncode:
        raise AssertionError(program.stderr[-3000:])
    plan = Plan(folder, slow.name, runs)
    numbers = ",".join(map(str, plan.planted))
    report = [sys.executable, "-m", "stepscope", "report", str(folder), "--step", numbers, "--json"]
    steps = json.loads(subprocess.run(report, capture_output=True, check=True).stdout)["steps"]
    assert [step["step"] for step in steps] == plan.planted
    took_ns, cores_ns = own_clock(folder, "planted"), own_clock(folder, "without cores")
    usual_ns = median(took_ns[step] for step in plan.steps if step not in plan.planted)
    expected = dict.fromkeys(plan.planted, slow)
    if slow.kind == "slow-host":  # both hosts are this machine: other load decides which of them waits longer
        hosts = json.loads((folder / "hosts.json").read_text())
        expected = {step: slow._replace(process=hosts[str(step)]) for step in plan.planted}
    return [
        _judge(
            expected[step["step"]], step["cause"], took_ns[step["step"]] - usual_ns, cores_ns[step["step"]]
        )
        for step in steps
    ]


def _judge(slow: SlowStep, cause: Any, took_ns: float, without_cores_ns: int) -> Verdict:
    if cause is None or slow.kind is None:
        # Other work on this machine is a culprit too, if the kernel says so.
        busy = cause is not None and cause["kind"] == "slow-host" and cause["longer_ns"] <= without_cores_ns
        is_right = slow.kind is None and (cause is None or busy)
        line = "nothing is named" if cause is None else f"{cause['kind']}: {cause['sentence']}"
        return Verdict(is_right, is_right, is_right, is_right, line)
    process = cause["process"] or {"role": None, "rank": None, "host": ""}
    names = (f"{process['role']} {process['rank']}" if cause["process"] else "", process["host"])
    longer_ns = cause["longer_ns"]
    return Verdict(
        kind=cause["kind"] == slow.kind,
        process=slow.process is None or slow.process in names,
        stage=cause["stage"] == slow.stage and (cause["trajectory"] or "").endswith(slow.trajectory),
        number=abs(longer_ns - took_ns) <= WITHIN * took_ns,
        line=f"{cause['kind']}: {cause['sentence']} [{longer_ns / 1e6:.0f} ms, planted {took_ns / 1e6:.0f}]",
    )
