"""Decision whether a process records, and the sentence that says why."""

from __future__ import annotations

import re

import pytest

from stepscope._recording.session.selection import Decision, decide, decide_process, unreachable_ranks
from stepscope.config import ProfileConfig

CONFIG = ProfileConfig(
    steps=[2, "10:50:10"],
    roles={
        "actor": {"ranks": [0, 8]},
        "rollout": {"ranks": "all"},
        "re*": {"ranks": "first"},
        "judge": {"ranks": [0, 8], "profiler": "off"},
    },
)
STAR = ProfileConfig(steps=[2], roles={"*": {"ranks": "first"}})


@pytest.mark.parametrize(
    ("role", "rank", "record", "reason"),
    [
        ("actor", 8, True, "rank 8 is in roles.actor.ranks [0, 8]"),
        ("actor", 3, False, "rank 3 is not in roles.actor.ranks [0, 8]"),
        ("actor", None, False, "rank is unknown and roles.actor.ranks asks for [0, 8]"),
        ("rollout", 3, True, "roles.rollout selects all ranks"),
        ("rollout", None, True, "roles.rollout selects all ranks"),
        ("ref", 0, True, "roles.re* selects the first rank and this is rank 0"),
        ("reward", 1, False, "roles.re* selects the first rank and this is rank 1"),
        ("ref", None, True, "roles.re* selects the first rank; the rank is unknown, so this may be it"),
        ("judge", 0, False, "roles.judge.profiler is off"),
        ("judge", None, False, "roles.judge.profiler is off"),
        ("env", 0, False, "no pattern in roles matches role 'env'"),
    ],
)
def test_role_and_rank_decide_at_a_captured_step(
    role: str, rank: int | None, record: bool, reason: str
) -> None:
    assert decide(CONFIG, role=role, rank=rank) == Decision(record=record, reason=reason)


def test_in_a_world_of_one_an_unknown_rank_is_0() -> None:
    decision = decide(CONFIG, role="actor", rank=None, world_size=1)
    assert decision.record
    assert decision.reason.startswith("rank 0 ")


def test_a_known_rank_is_kept_in_a_world_of_one() -> None:
    assert not decide(CONFIG, role="actor", rank=3, world_size=1).record


def test_a_process_of_several_roles_records_when_one_is_selected_and_says_which() -> None:
    decision = decide_process(CONFIG, roles=["env", "actor", "ref"], rank=8)
    assert decision.record
    assert decision.reason.startswith("role 'actor': rank 8 ")


def test_a_process_of_several_roles_that_are_all_refused_says_why_each_is() -> None:
    decision = decide_process(CONFIG, roles=["env", "actor"], rank=3)
    assert not decision.record
    assert re.search("'env'; rank 3 ", decision.reason)


def test_one_reason_for_several_roles_is_said_once() -> None:
    decision = decide_process(STAR, roles=["actor", "ref"], rank=3)
    assert decision.reason.count("rank 3") == 1


@pytest.mark.parametrize(
    ("role", "world_size", "beyond"),
    [
        ("actor", 4, (8,)),
        ("actor", 8, (8,)),
        ("actor", 9, ()),
        ("rollout", 1, ()),
        ("ref", 1, ()),
        ("env", 1, ()),
        ("judge", 1, ()),
    ],
)
def test_ranks_that_the_world_does_not_have_are_named(
    role: str, world_size: int, beyond: tuple[int, ...]
) -> None:
    assert unreachable_ranks(CONFIG, role, world_size) == beyond
