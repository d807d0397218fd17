"""Processes that a profiler slowed, and what the report no longer concludes from their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.steps import MS, close, some
from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest import Expectation, ProcessPart
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.timeline import load_step
from stepscope_report.timeline.load import profiled_keys


def part(
    role: str, pid: int, *artifacts: Artifact, rank: int | None = None, profiled: bool = False
) -> ProcessPart:
    source = None if rank is None else "position"
    info = ProcessInfo(role=role, rank=rank, world_size=None, host="a", pid=pid, rank_source=source)
    return ProcessPart(
        run_id="r", step=2, process=info, owner=role == "trainer", opened=ClockAnchor(wall_ns=0, mono_ns=0),
        recorded=True, why="all", profiled=profiled,
        expected=tuple(
            Expectation(name=file.path, kind="engine", state="ok", artifacts=(file,)) for file in artifacts
        ),
    )  # fmt: skip


def trace(pid: int | None, replica: int | None = None) -> Artifact:
    return Artifact(
        path=f"{pid}-{replica}", kind="torch_trace", tool="torch", role="rollout", stage=None, rank=None,
        world_size=None, replica=replica, host="a", pid=pid, size_bytes=1,
    )  # fmt: skip


def test_a_process_is_profiled_if_a_profiler_ran_in_it_and_not_if_it_was_to() -> None:
    parts = [part("actor", 1, profiled=True), part("actor", 2)]
    assert profiled_keys(parts) == {parts[0].process.key}


def test_an_engines_trace_is_of_the_process_that_wrote_it() -> None:
    replicas = [part("rollout", pid, rank=pid - 10) for pid in (10, 11)]
    trainer = part("trainer", 1, trace(11, replica=0))  # numbered by the engines given, not by the workers
    assert profiled_keys([trainer, *replicas]) == {replicas[1].process.key}


@pytest.mark.parametrize("pid", [None, 99])
def test_a_trace_of_an_engines_own_process_is_of_its_replica(pid: int | None) -> None:
    replicas = [part("rollout", pid, rank=pid - 10) for pid in (10, 11)]
    trainer = part("trainer", 1, trace(pid, replica=1))
    assert profiled_keys([trainer, *replicas]) == {replicas[1].process.key}


def served(root: Path, profiled: tuple[int, ...]) -> StepReport:
    """Twenty trajectories over four replicas. Those of replica 0 end at 900 ms, all others at 500 ms."""
    folder = StepFolder(root)
    driver = folder.process("trainer", owner=True)
    replicas = [folder.process("rollout", rank) for rank in range(4)]
    for number in range(20):
        replica = 0 if number < 2 else 1 + number % 3
        end = (900 if replica == 0 else 500) * MS
        above = driver.span("trajectory", 0, end, role="agent_loop", trajectory=f"t{number}")
        replicas[replica].span(
            "decode", 0, end, trajectory=f"t{number}", link=driver.link(above), attrs={"tokens": 100}
        )
    close(folder, 1000 * MS)
    for rank in profiled:
        replicas[rank].profiled = True
    return step_report(load_step(folder.write()))


def rules(report: StepReport) -> set[str]:
    return {advice.rule for advice in report.advice} & {"long-tail", "straggler", "uneven-profiling"}


@pytest.mark.parametrize(
    ("profiled", "expected"),
    [
        ((), {"long-tail", "straggler"}),
        ((0, 1, 2, 3), {"long-tail", "straggler"}),
        ((0,), {"uneven-profiling"}),
        ((1,), {"long-tail", "straggler"}),
        ((0, 1), {"straggler", "uneven-profiling"}),
    ],
)
def test_the_tail_and_the_straggler_are_named_only_where_no_profiler_made_them(
    tmp_path: Path, profiled: tuple[int, ...], expected: set[str]
) -> None:
    assert rules(served(tmp_path, profiled)) == expected


def test_slow_trajectories_name_the_profiled_processes_that_served_them(tmp_path: Path) -> None:
    tail = some(served(tmp_path, (0,)).long_tail)
    assert tail.profiled == ("rollout 0",)
    assert tail.last_profiled == 2
    assert {slow.trajectory for slow in tail.worst if slow.profiled} == {"t0", "t1"}


def test_trajectories_are_not_marked_where_all_replicas_are_profiled_alike(tmp_path: Path) -> None:
    tail = some(served(tmp_path, (0, 1, 2, 3)).long_tail)
    assert not tail.profiled
    assert not any(slow.profiled for slow in tail.worst)
