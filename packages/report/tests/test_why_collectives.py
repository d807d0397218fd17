"""Collectives that have not completed: `stepscope why` names the ranks that miss them."""

from __future__ import annotations

import json
import pickle
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed.flight_recorder.components.builder import build_db

from packages.report.tests.three_ranks import hanging
from stepscope._recording.recorder.collectives import joined, parsed
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import (
    Collectives,
    Frame,
    OpenSpan,
    PendingCollective,
    ProcessGroup,
    ProcessState,
    Thread,
)
from stepscope_report.cli.why import ask
from stepscope_report.waiting import Behind, Entered, say_call
from stepscope_report.why import why

RANK = """
from torch._C import _distributed_c10d as binding
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(2))
def wait_for_the_device():
    threading.Event().wait()
def all_but_the_last_ended():
    entries = json.loads(binding._dump_fr_trace_json())["entries"]
    return all(entry["retired"] for entry in (entries if rank == 2 else entries[:-1]))
def ready():
    while not all_but_the_last_ended():  # the recorder notes the end of a call after the call has returned
        time.sleep(0.01)
    for name, dump in (("json", binding._dump_fr_trace_json), ("pickle", binding._dump_fr_trace)):
        with open(f"{folder}/{name}{rank}", "wb") as file:
            file.write(dump())
    print("ready", flush=True)
@profile_step("actor")
def update():
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)
    if rank != 2:
        work = dist.all_reduce(torch.ones(2), async_op=True)
    ready()
    wait_for_the_device()
with capture(3, role="actor"):
    update()
"""


WITHOUT_RECORDER = """
pair = dist.new_group([0, 1])
def reduce():
    dist.all_reduce(torch.ones(2))
def load():
    threading.Event().wait()
@profile_step("actor")
def update():
    reduce()
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)
    print("ready", flush=True)
    load() if rank == 2 else reduce()
with capture(3, role="actor"):
    update()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    with hanging(folder, RANK, TORCH_FR_BUFFER_SIZE="200"):
        yield folder


def test_the_rank_that_others_wait_for_in_the_background_is_named(run: Path) -> None:
    answer = why(ask(RunLayout(run), 10))
    assert len(answer.calls) == 3
    (first,) = [answer.calls[index] for index in answer.culprits]
    others = [call for call in answer.calls if call.waits_for]
    assert "actor_rank2_" in first.process
    assert first.collective is None
    assert [(call.collective, call.group, call.number, call.missing) for call in others] == [
        ("all_reduce", "default_pg", 2, (2,))
    ] * 2
    assert "without rank 2)" in say_call(others[0])


@pytest.mark.slow
def test_without_torch_s_recorder_the_groups_own_counts_name_the_rank(tmp_path: Path) -> None:
    with hanging(tmp_path, WITHOUT_RECORDER, TORCH_FR_BUFFER_SIZE="0"):
        time.sleep(1)  # until the last collective is open
        answer = why(ask(RunLayout(tmp_path), 10))
    (first,) = (answer.calls[index] for index in answer.culprits)
    assert "actor_rank2_" in first.process
    assert "load at" in first.where
    assert first.behind == Behind(group="default_pg", state="behind", begun=1, others=2)
    assert "has begun 1 collective of group default_pg; other ranks have begun 2" in say_call(first)
    others = [call for call in answer.calls if call.waits_for]
    assert [(call.collective, call.group, call.number, call.missing) for call in others] == [
        ("all_reduce", "default_pg", 2, (2,))
    ] * 2


def test_two_jobs_with_the_same_groups_are_not_mixed_up() -> None:
    """Two replicas of one role whose replica nobody knows: the ranks of one are not behind the other's."""
    group = ProcessGroup(name="0", description="default_pg", ranks=(0, 1), entered=0)
    states = []
    for job in (7, 9):
        own = msgspec.structs.replace(group, entered=job)
        pending = PendingCollective(
            group="0", description="default_pg", number=job, op="all_reduce", state="started", age_ns=1
        )
        states += [
            state_of(rank, Collectives(rank=rank, groups=(own,), pending=(pending,))) for rank in (0, 1)
        ]
    entered = Entered(states)
    assert [entered.behind(state) for state in states] == [None] * 4
    assert [entered.awaited(state)[1] for state in states] == [()] * 4


def test_two_runs_with_one_role_in_one_folder_are_not_mixed_up() -> None:
    """One run waits for its rank that loads; in the other, the same rank is in the collective."""
    states: list[ProcessState] = []
    for run_id, late in (("feed0004", 5), ("feed0005", 6)):
        for number, rank in enumerate((4, late)):
            state = waiting(rank, None)
            process = msgspec.structs.replace(
                state.process, rank=4 + number, world_size=None, pid=len(states) + 1
            )
            states.append(msgspec.structs.replace(state, run_id=run_id, process=process))
    answer = why(states)
    loads = states[1].process.key
    assert answer.calls[answer.culprits[0]].process == loads
    waits = {call.process: [answer.calls[at].process for at in call.waits_for] for call in answer.calls}
    assert waits[states[0].process.key] == [loads]
    assert all(loads not in waits[state.process.key] for state in states[2:])


@pytest.mark.parametrize("launchers", [(100, 200), (100, 100)])
def test_two_jobs_of_one_run_are_told_apart_by_the_processes_that_started_them(
    launchers: tuple[int, int],
) -> None:
    """The first job's rank 5 loads; the second job's rank 5 is in the collective, and nobody waits for it."""
    states: list[ProcessState] = []
    for launcher, late in zip(launchers, (5, 6), strict=True):
        for rank, place in enumerate((4, late)):
            state = waiting(place, None)
            process = msgspec.structs.replace(state.process, rank=rank, world_size=2, pid=len(states) + 1)
            states.append(msgspec.structs.replace(state, process=process, ancestors=(launcher, 1)))
    answer = why(states)
    loads = states[1].process.key
    assert answer.calls[answer.culprits[0]].process == loads
    waits = {call.process: [answer.calls[at].process for at in call.waits_for] for call in answer.calls}
    missing = {call.process: call.missing for call in answer.calls}
    is_known = launchers[0] != launchers[1]
    assert waits[states[0].process.key] == ([loads] if is_known else [])
    assert missing[states[0].process.key] == ((1,) if is_known else ())
    assert not any(waits[state.process.key] or missing[state.process.key] for state in states[2:])


def test_torch_reads_the_same_ranks_from_its_own_dump(run: Path) -> None:
    """The recorder of NCCL also knows the ranks of each group, which gloo's leaves out."""
    details, states = {}, []
    for rank in range(3):
        dump = named_as_nccl(pickle.loads((run / f"pickle{rank}").read_bytes()))
        entries = [entry for entry in dump["entries"] if not entry["retired"]]
        details[f"rank{rank}"] = {**dump, "entries": entries, "rank": rank}
        text = json.dumps(named_as_nccl(json.loads((run / f"json{rank}").read_bytes())))
        states.append(state_of(rank, joined([parsed(text)], rank, {})))
    arguments = Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10
    )
    (collective,) = build_db(details, arguments, str(details["rank0"]["version"])).collectives
    call, missing = Entered(states).awaited(states[0])
    assert call is not None
    assert collective.missing_ranks == set(missing) == {2}
    assert collective.collective_name == f"nccl:{call.op}"
    assert (collective.collective_seq_id, collective.collective_state) == (call.number, call.state)
    assert Entered(states).awaited(states[2]) == (None, ())


def named_as_nccl(dump: dict[str, Any]) -> dict[str, Any]:
    """Return a dump of gloo's with the names of NCCL's, and with its groups."""
    for entry in dump["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    groups = {"0": ("default_pg", "[0, 1, 2]"), "1": ("undefined", "[0, 1]")}
    config = {name: {"name": name, "desc": desc, "ranks": ranks} for name, (desc, ranks) in groups.items()}
    return {**dump, "pg_config": config}


def state_of(rank: int, collectives: Collectives | None) -> ProcessState:
    assert collectives is not None
    process = ProcessInfo(role="actor", rank=rank, world_size=3, host="a", pid=rank)
    return ProcessState(
        process=process, run_id="feed0004", at_ns=0, step=3, spans=(), threads=(), tasks=(),
        collectives=collectives,
    )  # fmt: skip


def test_a_thousand_ranks_are_joined_in_time() -> None:
    """Without torch's flight recorder, and with it; by CPU time, so that other work does not count."""
    for entered in (None, 7):
        states = [waiting(rank, entered) for rank in range(1024)]
        began = time.process_time()
        answer = why(states)
        assert time.process_time() - began < 1.5
        (first,) = answer.culprits
        assert answer.calls[first].where.startswith("load at ")
        assert answer.held == 1023


def waiting(rank: int, entered: int | None) -> ProcessState:
    """Return a rank in a collective, or the one that loads its batch."""
    own = Frame("loop.py", 9, "load") if rank == 5 else Frame("loop.py", 3, "update")
    inner = Frame("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    frames = (own,) if rank == 5 else (inner, own)
    pending = PendingCollective(
        group="0", description="default", number=entered, op="all_reduce", state="started", age_ns=1
    )
    group = ProcessGroup(
        name="0", description="default", ranks=tuple(range(1024)), entered=(entered or 0) - (rank == 5)
    )
    known = Collectives(rank=rank, groups=(group,), pending=() if rank == 5 else (pending,))
    state = state_of(rank, known)
    return msgspec.structs.replace(
        state,
        process=msgspec.structs.replace(state.process, world_size=1024),
        spans=(OpenSpan(span=1, role="actor", stage="update", age_ns=1, thread=1),),
        threads=(Thread(id=1, name="MainThread", frames=frames),),
        collectives=None if entered is None else known,
    )
