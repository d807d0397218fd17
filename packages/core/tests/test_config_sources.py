"""Files, the environment, arguments, and which of them wins."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stepscope.config import (
    RESERVED_VARIABLES,
    ProfileConfig,
    RoleConfig,
    StepRange,
    ThroughputConfig,
    TorchConfig,
    resolve,
)
from stepscope.errors import ConfigError


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "stepscope.yaml"
    path.write_text(
        "save_path: from_file\n"
        "steps: [2]\n"
        "torch: {with_stack: true, activities: [cpu]}\n"
        "roles:\n"
        "  actor: {ranks: [0, 8]}\n"
        '  "*": {ranks: first}\n'
    )
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert resolve(environ={}) == ProfileConfig()


def test_arguments_lie_over_the_environment_over_a_file_over_the_defaults(written: Path) -> None:
    from_env = {"STEPSCOPE_SAVE_PATH": "from_env"}
    config = resolve(written, environ={})
    assert (config.save_path, config.mode) == ("from_file", "continuous")
    config = resolve(written, environ=from_env)
    assert (config.save_path, config.steps) == ("from_env", (StepRange(2, 3),))
    assert resolve(written, environ=from_env, save_path="from_python").save_path == "from_python"


def test_the_environment_is_the_process_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_MODE", "discrete")
    assert resolve().mode == "discrete"


def test_no_other_variable_has_the_name_of_a_field() -> None:
    assert resolve(environ={"STEPSCOPE_COLLECTIVES": "off"}).collectives is False
    assert not {f"STEPSCOPE_{name.upper()}" for name in ProfileConfig.__struct_fields__} & RESERVED_VARIABLES


def test_the_environment_names_the_file_when_nobody_else_does(written: Path) -> None:
    assert resolve(environ={"STEPSCOPE_CONFIG": str(written)}).save_path == "from_file"
    assert ProfileConfig.from_env({"STEPSCOPE_CONFIG": str(written)}).save_path == "from_file"


def test_a_file_given_in_python_replaces_the_one_in_the_environment(written: Path) -> None:
    assert resolve(written, environ={"STEPSCOPE_CONFIG": "/nowhere"}).save_path == "from_file"


def test_mappings_are_merged_and_everything_else_is_replaced(written: Path) -> None:
    config = resolve(
        written, environ={"STEPSCOPE_TORCH__RECORD_SHAPES": "1"}, torch={"activities": ["cuda"]}, steps=[3]
    )
    assert config.torch == TorchConfig(with_stack=True, record_shapes=True, activities=("cuda",))
    assert config.steps == (StepRange(3, 4),)


def test_a_ready_section_replaces_the_whole_section(written: Path) -> None:
    config = resolve(written, environ={}, torch=TorchConfig(record_shapes=True))
    assert config.torch == TorchConfig(record_shapes=True)


def test_a_ready_config_is_taken_exactly_as_it_is() -> None:
    ready = ProfileConfig(steps=[7])
    assert resolve(ready, environ={"STEPSCOPE_STEPS": "3", "STEPSCOPE_CONFIG": "/nowhere"}) is ready


def test_a_mapping_takes_the_place_of_the_file(written: Path) -> None:
    environ = {"STEPSCOPE_CONFIG": str(written), "STEPSCOPE_TORCH__WITH_STACK": "1"}
    config = resolve({"steps": [4], "torch": {"record_shapes": True}}, environ, mode="discrete")
    plain = {"steps": [4], "torch": {"record_shapes": True, "with_stack": True}, "mode": "discrete"}
    assert config == ProfileConfig.from_mapping(plain)
    with pytest.raises(ConfigError, match="no 'step'"):
        resolve({"step": [4]}, {})


def test_what_is_no_file_and_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"configure\(source\) is "):
        resolve(7, {})  # type: ignore[arg-type] # that is the point


def test_arguments_next_to_a_ready_config_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps is \[3\].* ready"):
        resolve(ProfileConfig(), environ={}, steps=[3])


def test_a_role_added_later_is_not_hidden_behind_the_star(written: Path) -> None:
    config = resolve(written, environ={"STEPSCOPE_ROLES__ENV__RANKS": "all"})
    assert list(config.roles) == ["actor", "env", "*"]
    assert config.role("env") == ("env", RoleConfig(ranks="all"))


def test_a_role_changed_later_keeps_its_place(written: Path) -> None:
    config = resolve(written, environ={}, roles={"actor": {"ranks": "all"}, "*": {"ranks": "all"}})
    assert [(name, role.ranks) for name, role in config.roles.items()] == [("actor", "all"), ("*", "all")]


def test_the_default_role_goes_when_any_role_is_named() -> None:
    config = resolve(environ={"STEPSCOPE_ROLES__ACTOR__RANKS": "0,8"})
    assert config.roles == {"actor": RoleConfig(ranks=(0, 8))}


def test_an_unknown_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"mean 'steps'\?"):
        resolve(environ={}, stpes=[2])  # type: ignore[call-arg]  # the fact of this test


def test_every_kind_of_field_can_be_set_from_the_environment() -> None:
    config = ProfileConfig.from_env(
        {
            "STEPSCOPE_STEPS": "2,10:50:10",
            "STEPSCOPE_SAVE_PATH": "/data/profile",
            "STEPSCOPE_TOOL": "nsys",
            "STEPSCOPE_MODE": "discrete",
            "STEPSCOPE_TORCH__WITH_STACK": "1",
            "STEPSCOPE_TORCH__ACTIVITIES": "cpu, cuda",
            "STEPSCOPE_TORCH__SCHEDULE__ACTIVE": "3",
            "STEPSCOPE_BUDGET__SECONDS": "2.5",
            "STEPSCOPE_CUDA_MEMORY__ON_OOM": "false",
            "STEPSCOPE_ROLES__ACTOR__RANKS": "0,8",
            "STEPSCOPE_ROLES__ROLLOUT__ENGINE__ITERATIONS__COUNT": "64",
            "STEPSCOPE_ROLES__ROLLOUT__ENGINE__EXTRA": '{"level": 1}',
            "HOME": "/root",
        }
    )
    assert config == ProfileConfig(
        steps=[2, "10:50:10"],
        save_path="/data/profile",
        tool="nsys",
        mode="discrete",
        torch={"with_stack": True, "activities": ["cpu", "cuda"], "schedule": {"active": 3}},
        budget={"seconds": 2.5},
        cuda_memory={"on_oom": False},
        roles={
            "actor": {"ranks": [0, 8]},
            "rollout": {"engine": {"iterations": {"count": 64}, "extra": {"level": 1}}},
        },
    )


def test_a_mapping_in_a_variable_is_json_and_longer_names_lie_over_it() -> None:
    config = ProfileConfig.from_env(
        {
            "STEPSCOPE_TORCH__WITH_STACK": "0",
            "STEPSCOPE_TORCH": '{"with_stack": true, "record_shapes": true}',
            "STEPSCOPE_ROLES": '{"roll*": {"ranks": "all"}, "*": {}}',
        }
    )
    assert config.torch == TorchConfig(record_shapes=True)
    assert list(config.roles) == ["roll*", "*"]


@pytest.mark.parametrize("text", ["null", '{"active": 2}'])
def test_what_may_be_unset_can_be_unset_from_the_environment(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("torch: {schedule: {active: 5}}")
    schedule = resolve(path, environ={"STEPSCOPE_TORCH__SCHEDULE": text}).torch.schedule
    assert (schedule is None) == (text == "null")


def test_an_empty_variable_is_an_empty_value(written: Path) -> None:
    assert resolve(written, environ={"STEPSCOPE_STEPS": ""}).steps == ()
    with pytest.raises(ConfigError, match=r"''.*in STEPSCOPE_TOOL"):
        resolve(environ={"STEPSCOPE_TOOL": ""})


@pytest.mark.parametrize("name", ["CONFIG", "DISABLE", "RAISE", "RANK", "ROLE", "RUN_ID"])
def test_variables_with_another_job_are_let_through(name: str) -> None:
    assert ProfileConfig.from_env({f"STEPSCOPE_{name}": ""}) == ProfileConfig()


@pytest.mark.parametrize(
    ("variable", "text", "helps"),
    [
        ("STEPSCOPE_STEP", "2", r"there is no 'STEPSCOPE_STEP'; did you mean 'STEPSCOPE_STEPS'\?"),
        ("STEPSCOPE_TORCH_WITH_STACK", "1", r"did you mean 'STEPSCOPE_TORCH__WITH_STACK'\?"),
        ("STEPSCOPE_ROLES__ACTOR__RANK", "0", r"did you mean 'STEPSCOPE_ROLES__ACTOR__RANKS'\?"),
        ("STEPSCOPE_RUNID", "0", r"did you mean 'STEPSCOPE_RUN_ID'\?"),
        ("STEPSCOPE_ROLES____RANKS", "0", "there is no"),
        ("STEPSCOPE_ROLES__A__ENGINE__EXTRA__X", "1", r"did you mean 'STEPSCOPE_ROLES__A__ENGINE__EXTRA'\?"),
        ("STEPSCOPE_", "1", "there is no 'STEPSCOPE_'"),
        ("STEPSCOPE_QWERTZ", "1", "unset it"),
        (
            "STEPSCOPE_TORCH__WITH_STACK",
            "yes",
            r"torch.with_stack is 'yes'; allowed: true or false.*in STEPSCOPE_T",
        ),
        ("STEPSCOPE_BUDGET__SPANS", "many", "budget.spans is 'many'; allowed: a whole number >= 1"),
        ("STEPSCOPE_BUDGET__SECONDS", "inf", "budget.seconds is 'inf'; allowed: a finite number > 0"),
        ("STEPSCOPE_MODE", "discret", r"did you mean 'discrete'\? \(in STEPSCOPE_MODE\)"),
        ("STEPSCOPE_STEPS", "5:2", r"steps is '5:2'.*\(in STEPSCOPE_STEPS\)"),
        (
            "STEPSCOPE_ROLES__ACTOR",
            "0,8",
            "roles.actor is '0,8'; allowed: JSON of a mapping with the keys ranks",
        ),
        ("STEPSCOPE_ROLES__ACTOR__RANKS", "", "an empty list selects nothing"),
        ("STEPSCOPE_TORCH", '{"with_stak": 1}', r"did you mean 'with_stack'\? \(in STEPSCOPE_TORCH\)"),
        ("STEPSCOPE_ROLES", "[]", r"roles is \[\]"),
    ],
)
def test_a_wrong_variable_is_named_with_its_fix(variable: str, text: str, helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig.from_env({variable: text})


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "stepscope.json"
    path.write_text('{"steps": [2, "10:50:10"], "roles": {"*": {"ranks": "all"}}}')
    assert ProfileConfig.from_file(path) == ProfileConfig(
        steps=[2, "10:50:10"], roles={"*": {"ranks": "all"}}
    )


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert ProfileConfig.from_file(path) == ProfileConfig()


def test_an_unquoted_range_is_not_a_base_60_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("steps: [2, 10:50:10]\n")  # YAML 1.1: 2 and 39010
    assert ProfileConfig.from_file(path).steps == (StepRange(2, 3), StepRange(10, 50, 10))


def test_a_number_with_an_exponent_needs_no_sign(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("throughput: {flops_per_token: 4.8e10, device_peak_tflops: 1E3}")  # YAML 1.1: texts
    assert ProfileConfig.from_file(path).throughput == ThroughputConfig(
        flops_per_token=48_000_000_000, device_peak_tflops=1000
    )


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("steps: [2", r"c.yaml'; allowed: a YAML file. Fix: line 1 is `steps: \[2`: expected ','"),
        ("roles:\n  *: {}", r"c.yaml'.*line 2 is `\*: {}`: .*\. Put names that begin with \*.* in quotes"),
        ("redact: [*_token]", r"line 1 is `redact: .*`: found undefined alias.*in quotes"),
        ("a:\n\tb: 1", r"line 2 is `b: 1`: .*Indent with spaces"),
        ("- 2\n- 3\n", "a YAML file that holds a mapping"),
        ("steps: [2]\nmode: discrete\nsteps: [3]\n", r"'steps' stands twice"),
        ("roles:\n  actor: {ranks: all}\n  actor: {ranks: first}\n", r"'actor' stands twice"),
        ("roles: {on: {ranks: all}}", "roles is True.*in quotes"),
        ("tool: yes", "tool is True"),
        ("steps: yes", "steps is True"),
        ("budget: {seconds: '300'}", r"without quotes \(in .*c.yaml\)"),
        ("stepz: [2]", r"did you mean 'steps'\? \(in .*c.yaml\)"),
        ("? [1, 2]\n: 3", "there is no|unhashable"),
    ],
)
def test_a_wrong_file_is_named_with_its_fix(text: str, helps: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){helps}"):
        ProfileConfig.from_file(path)


MISTAKES = """
steps: soon
stepz: [2]
torch: {with_stak: true, with_flops: 1}
roles: {actor: {ranks: []}, critic: {rank: 0}}
instrument: [{preset: verll}, {module: json, name: loads}]
"""


def test_all_that_is_wrong_in_a_file_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MISTAKES)
    with pytest.raises(ConfigError) as caught:
        ProfileConfig.from_file(path)
    errors = [caught.value, *caught.value.also]
    assert [error.field for error in errors] == [
        "steps", "stepz", "torch.with_stak", "torch.with_flops", "roles.actor.ranks", "roles.critic.rank",
        "instrument.preset", "instrument.role",
    ]  # fmt: skip
    lines = str(caught.value).splitlines()
    assert all(
        f"{error.field} is {error.value!r}; allowed: " in line
        for error, line in zip(errors, lines, strict=True)
    )
    assert all("Fix: " in line and line.endswith(f"(in {path})") for line in lines)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_all_variables_that_are_wrong_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileConfig.from_env({"STEPSCOPE_TOOL": "", "STEPSCOPE_STEPS": "5:2", "STEPSCOPE_MODE": "discrete"})
    assert [error.field for error in (caught.value, *caught.value.also)] == ["steps", "tool"]


def test_a_config_that_is_made_in_python_names_all_that_is_wrong_with_it() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileConfig(tool="", steps="soon")
    assert [error.field for error in (caught.value, *caught.value.also)] == ["steps", "tool"]


def test_a_wrong_value_in_a_file_is_an_error_even_when_it_is_overridden(written: Path) -> None:
    written.write_text("steps: soon")
    with pytest.raises(ConfigError, match="steps is 'soon'"):
        resolve(written, environ={}, steps=[2])


def test_a_file_that_is_not_text_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ConfigError, match="a YAML file"):
        ProfileConfig.from_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such"):
        ProfileConfig.from_file(tmp_path / "nowhere")


def test_a_missing_file_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"STEPSCOPE_CONFIG.*'/nowhere'"):
        resolve(environ={"STEPSCOPE_CONFIG": "/nowhere"})
