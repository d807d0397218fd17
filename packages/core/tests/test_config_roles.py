"""Role patterns and ranks: what is matched, what is refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.config import EngineConfig, IterationsConfig, ProfileConfig, RoleConfig
from stepscope.config._roles import hides
from stepscope.errors import ConfigError

names = st.text("ab*?[]", max_size=5)


def test_the_first_pattern_in_written_order_wins() -> None:
    config = ProfileConfig(roles={"actor": {"ranks": [0, 8]}, "act*": {"ranks": "all"}, "*": {}})
    assert config.role("actor") == ("actor", RoleConfig(ranks=(0, 8)))
    assert config.role("actress") == ("act*", RoleConfig(ranks="all"))
    assert config.role("env") == ("*", RoleConfig(ranks="first"))


def test_case_matters_in_role_names() -> None:
    assert ProfileConfig(roles={"actor": {}}).role("Actor") is None


def test_first_is_the_default_of_every_role_that_is_no_rollout() -> None:
    assert ProfileConfig().role("anything") == ("*", RoleConfig(ranks="first"))


def test_by_default_no_replica_is_profiled_and_all_engines_are_recorded_alike() -> None:
    assert ProfileConfig().role("rollout") == ("rollout", RoleConfig(ranks="all", profiler=False))


@pytest.mark.parametrize(
    ("written", "on"),
    [("off", False), ("on", True), ("false", False), ('"off"', False), ('"on"', True), ("OFF", False)],
)
def test_the_profiler_of_a_role_is_on_or_off(tmp_path: Path, written: str, on: bool) -> None:
    path = tmp_path / "stepscope.yaml"
    path.write_text(f"roles: {{rollout: {{profiler: {written}}}}}")
    config = ProfileConfig.from_file(path)
    assert config.roles["rollout"].profiler is on
    assert ProfileConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize("value", ["none", "torch", None, 0, []])
def test_a_profiler_that_is_neither_on_nor_off_is_refused_with_its_fix(value: object) -> None:
    helps = r"roles.rollout.profiler is .*; allowed: on or off. Fix: write profiler: off for spans alone"
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig.from_mapping({"roles": {"rollout": {"profiler": value}}})


@pytest.mark.parametrize(
    ("patterns", "helps"),
    [
        (["*", "actor"], r"'\*' matches all that 'actor' does; write 'actor' before '\*'"),
        (["act*", "critic", "actor"], r"'act\*' matches all that 'actor' does"),
        (["a*", "ac*r"], r"'a\*' matches all that 'ac\*r' does"),
        (["*", "a?"], "matches all that"),
        (["a?", "ab"], "matches all that"),
    ],
)
def test_a_pattern_that_is_never_reached_is_refused(patterns: list[str], helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig(roles={pattern: {} for pattern in patterns})


@pytest.mark.parametrize(
    "patterns", [["actor", "*"], ["a?", "a*"], ["ac*r", "a*"], ["a?", "abc"], ["[ab]", "?"]]
)
def test_patterns_that_can_be_reached_stand(patterns: list[str]) -> None:
    assert list(ProfileConfig(roles={pattern: {} for pattern in patterns}).roles) == patterns


@given(names, names, st.lists(st.text("ab", max_size=5)))
def test_a_hidden_pattern_matches_nothing_that_the_hiding_one_does_not(
    earlier: str, later: str, tried: list[str]
) -> None:
    if hides(earlier, later):
        assert all(fnmatchcase(name, earlier) for name in (*tried, later) if fnmatchcase(name, later))


@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ("all", "all"),
        ("first", "first"),
        ([0, 8], (0, 8)),
        (3, (3,)),
        ("0, 8", (0, 8)),
        (range(2), (0, 1)),
        ([0, "8-10"], (0, 8, 9, 10)),
    ],
)
def test_ranks_have_friendly_spellings(ranks: object, kept: object) -> None:
    role = ProfileConfig.from_mapping({"roles": {"actor": {"ranks": ranks}}}).roles["actor"]
    assert role.ranks == kept


@pytest.mark.parametrize(
    ("ranks", "helps"),
    [
        ([0, 8, 0], r"roles.actor.ranks is \[0, 8, 0\]; allowed: each rank once. Fix: take the second 0 out"),
        ([-1], r"roles.actor.ranks is -1; .*do not count from the end"),
        ([True], "roles.actor.ranks is True"),
        ([1.0], "roles.actor.ranks is 1.0"),
        ("frist", r"roles.actor.ranks is 'frist'.*did you mean 'first'\?"),
        ("ALL", r"did you mean 'all'\?"),
        ("", "an empty list selects nothing"),
        ("8-", r"roles.actor.ranks is '8-'; allowed: ranges of ranks with an end.*write the last rank too"),
        ("0-99999999999", "at most 65536 ranks"),
        ("0-3,2", "take the second 2 out"),
        (None, "roles.actor.ranks is None"),
        ({"first": 1}, "roles.actor.ranks is"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_their_fix(ranks: object, helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig.from_mapping({"roles": {"actor": {"ranks": ranks}}})


@pytest.mark.parametrize(
    ("roles", "helps"),
    [
        (["actor"], r"roles is \['actor'\]; allowed: a mapping of role patterns"),
        ({"actor": None}, "roles.actor is None.*write {} or leave it out"),
        (
            {"actor": [0, 8]},
            r"roles.actor is \[0, 8\]; allowed: .* the keys ranks, profiler, engine",
        ),
        ({True: {}}, "roles is True; .*in quotes"),  # `on:` in YAML
        ({"": {}}, "roles is ''"),
        ({"actor": {"rank": [0]}}, r"roles.actor.rank is .*did you mean 'ranks'\?"),
    ],
)
def test_a_role_that_cannot_be_is_refused_with_its_fix(roles: object, helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig.from_mapping({"roles": roles})


def test_an_error_in_a_role_made_on_its_own_says_where_roles_stand() -> None:
    with pytest.raises(ConfigError, match=r"roles\.<role>\.ranks"):
        RoleConfig(ranks=())


def test_engine_options_are_nested_under_their_role() -> None:
    engine = {"iterations": {"start": 2, "count": 64}, "by_stage": True, "extra": {"host_tracer_level": 2}}
    config = ProfileConfig(roles={"rollout": {"ranks": "all", "engine": engine}})
    assert config.roles["rollout"].engine == EngineConfig(
        iterations=IterationsConfig(start=2, count=64), by_stage=True, extra={"host_tracer_level": 2}
    )


@pytest.mark.parametrize(
    ("engine", "helps"),
    [
        (
            {"iterations": {"count": 0}},
            "roles.rollout.engine.iterations.count is 0; allowed: a whole number >= 1",
        ),
        ({"iterations": {"start": -1}}, "roles.rollout.engine.iterations.start is -1"),
        ({"count": 64}, "did you mean 'roles.<role>.engine.iterations.count'"),
        ({"extra": {"a": [1]}}, "roles.rollout.engine.extra is"),
    ],
)
def test_engine_options_that_cannot_be_are_refused(engine: dict[str, object], helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig(roles={"rollout": {"engine": engine}})


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"actor": "all"}, r"roles\.actor is 'all'; .*Fix: write actor: \{ranks: all\}"),
        ({"actor": [0, 8]}, r"write actor: \{ranks: \[0, 8\]\}"),
        ({"*": "first"}, r'write "\*": \{ranks: first\}'),
        ({"rollout": False}, r"write rollout: \{profiler: off\}"),
        ({"rollout": "of"}, r"write rollout: \{ranks: all\}"),
    ],
)
def test_a_role_that_is_one_of_its_settings_is_answered_with_the_right_form(
    given: dict[str, object], fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix):
        ProfileConfig.from_mapping({"roles": given})
