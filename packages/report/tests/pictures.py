"""A step of a known shape for tests of pictures, as large as asked for, and with names that would do harm."""

from __future__ import annotations

from pathlib import Path

from stepscope.files.manifest import Absent, Expectation, OwnCost
from stepscope.testing.steps import FakeProcess, StepFolder

MS = 1_000_000
HOSTILE = '</script><img src=x onerror="document.title=1"><script>throw 7</script>\x1b[31m&amp;\''


def rl_step(
    save_path: Path, *, step: int = 2, ranks: int = 8, trajectories: int = 24, hostile: str = ""
) -> StepFolder:
    """Rollout from 0 to 600 ms, update on all ranks from 600 ms, each rank 1 ms longer; closed at 1 s."""
    folder = StepFolder(save_path, step=step)
    driver = folder.process("trainer", owner=True, cost=OwnCost(start_ns=4 * MS, stop_ns=6 * MS))
    replica = folder.process("rollout", 0)
    roll = driver.span(f"rollout{hostile}", 0, 600 * MS, role="agent_loop")
    for index in range(trajectories):
        _trajectory(driver, replica, roll, f"t{index}{hostile}", index, trajectories)
    update = driver.span("update", 600 * MS, 950 * MS)
    for rank in range(ranks):
        actor = folder.process("actor", rank)
        policy = actor.span(
            "update_actor", 600 * MS, (700 + rank) * MS, link=driver.link(update), attrs={hostile: hostile}
        )
        actor.span("forward", 610 * MS, 640 * MS, parent=policy)
    for process in folder.processes:
        process.close(1000 * MS)
    if hostile:
        driver.absent.append(Absent(name=hostile, state="missing", reason=hostile))
        driver.expected.append(Expectation(name=hostile, kind="trace", state="failed", reason=hostile))
    return folder


def _trajectory(
    driver: FakeProcess, replica: FakeProcess, above: int, name: str, index: int, count: int
) -> None:
    start_ns, end_ns = index * MS, (100 + 500 * (index + 1) // count) * MS
    trajectory = driver.span("trajectory", start_ns, end_ns, role="agent_loop", parent=above, trajectory=name)
    turn = driver.span(
        "turn", start_ns, end_ns, role="agent_loop", parent=trajectory, trajectory=name, turn=0
    )
    link = driver.link(turn)
    replica.span(
        "queue", start_ns, start_ns + 10 * MS, link=link, trajectory=name, turn=0, attrs={"tier": index % 2}
    )
    replica.span("prefill", start_ns + 10 * MS, start_ns + 20 * MS, link=link, trajectory=name, turn=0)
    replica.span("decode", start_ns + 20 * MS, end_ns, link=link, trajectory=name, turn=0)
