from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import StepLayout
from stepscope.files.manifest import Expectation, ProcessPart, State
from stepscope.files.manifest_parts import fold, read_parts, worst
from stepscope.files.sidecar import ProcessInfo


def part(
    role: str = "actor", rank: int | None = 0, *states: State, owner: bool = False, **fields: object
) -> ProcessPart:
    made = ProcessPart(
        run_id="run1",
        step=2,
        process=ProcessInfo(role=role, rank=rank, world_size=None, host="h", pid=7),
        owner=owner,
        opened=ClockAnchor(wall_ns=0, mono_ns=0),
        recorded=True,
        why="every rank",
        expected=tuple(
            Expectation(name=f"file {n}", kind="trace", state=s, reason="why") for n, s in enumerate(states)
        ),
    )
    return msgspec.structs.replace(made, **fields)


def put(step: StepLayout, part: ProcessPart) -> None:
    path = step.part_of(part.process, part.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(part))


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ((), "skipped"),
        (("skipped",), "skipped"),
        (("ok", "skipped"), "ok"),
        (("ok", "partial"), "partial"),
        (("partial", "missing", "ok"), "missing"),
        (("missing", "failed", "partial"), "failed"),
    ],
)
def test_the_worst_state_wins_and_skipped_does_not_count(states: tuple[State, ...], state: State) -> None:
    assert worst(states) == state


def test_the_owner_comes_first_then_roles_and_ranks_in_order() -> None:
    parts = [part("rollout", None), part("actor", 10), part("actor", 2), part("trainer", 0, owner=True)]
    folded = fold(parts)
    assert [(p.process.role, p.process.rank) for p in folded.processes] == [
        ("trainer", 0),
        ("actor", 2),
        ("actor", 10),
        ("rollout", None),
    ]


def test_the_part_of_a_resumed_run_counts_even_if_its_clock_was_set_back() -> None:
    first, again = part("trainer", 0, owner=True), part("trainer", 0, owner=True)
    at_ns = first.opened.wall_ns
    again = msgspec.structs.replace(
        again,
        process=msgspec.structs.replace(again.process, pid=first.process.pid + 1),
        opened=ClockAnchor(wall_ns=at_ns + 1, mono_ns=0),
        imported_ns=at_ns + 10**9,
    )
    assert fold([first, again]).processes == (again,)


def test_two_runs_are_never_folded_into_one_manifest() -> None:
    with pytest.raises(RecordError, match=r"run1, .*run2"):
        fold([part(), part(run_id="run2")])


def test_parts_are_read_and_files_that_are_none_are_named_with_the_reason(tmp_path: Path) -> None:
    step = StepLayout(tmp_path)
    put(step, part("actor", 0, "ok"))
    put(step, part("actor", 1, "ok"))
    for name, data in {
        "empty": b"",
        "cut": b'{"run_id": "run1',
        "other": b'{"kind": "header"}',
        "bytes": b"\xff",
    }.items():
        (step.processes / f"{name}.json").write_bytes(data)
    (step.processes / ".actor.json.x8f").write_bytes(b"being written")
    parts, unreadable = read_parts(step)
    assert [p.process.rank for p in parts] == [0, 1]
    assert {path.name for path in unreadable} == {"empty.json", "cut.json", "other.json", "bytes.json"}
    assert "truncated" in unreadable[step.processes / "cut.json"]


def test_a_folder_without_parts_is_read_as_empty(tmp_path: Path) -> None:
    assert read_parts(StepLayout(tmp_path / "absent")) == ([], {})
