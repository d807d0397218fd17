"""Fields and their values: forms that are taken, errors that help, the way out and back."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.core.tests.runs import python
from stepscope.config import (
    BudgetConfig,
    CudaMemoryConfig,
    EngineConfig,
    ExportConfig,
    ProfileConfig,
    RoleConfig,
    ScheduleConfig,
    Settings,
    StepRange,
    TorchConfig,
)
from stepscope.errors import ConfigError

counts = st.integers(0, 2**53)
flags = st.booleans()
seconds = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
scalars = (
    st.none()
    | flags
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
schedules = st.builds(
    ScheduleConfig, skip_first=counts, wait=counts, warmup=counts, active=st.integers(1, 2**53), repeat=counts
)
torches = st.builds(
    TorchConfig,
    activities=st.lists(st.sampled_from(["cpu", "cuda", "xpu"]), min_size=1, unique=True),
    with_stack=flags,
    schedule=st.none() | schedules,
)
engines = st.builds(
    EngineConfig,
    iterations=st.fixed_dictionaries({"start": counts, "count": st.none() | st.integers(1, 2**53)}),
    merge=flags,
    extra=st.dictionaries(st.text(), scalars, max_size=3),
)
ranks = st.sampled_from(["all", "first"]) | st.lists(counts, min_size=1, max_size=4, unique=True)
roles = st.dictionaries(
    st.text("abcxyz", min_size=1), st.builds(RoleConfig, ranks=ranks, engine=engines), min_size=1, max_size=3
)
configs = st.builds(
    ProfileConfig,
    save_path=st.sampled_from(["outputs/profile", "/data/profile", "a b/ü"]),
    steps=st.lists(st.integers(0, 9), unique=True) | st.sampled_from(["10:50:10", "every:7", "3::2", "5:9"]),
    tool=st.sampled_from(["torch", "nsys", "npu", "cuda_memory", "mine"]),
    mode=st.sampled_from(["continuous", "discrete"]),
    roles=roles,
    torch=torches,
    cuda_memory=st.builds(CudaMemoryConfig, stacks=st.sampled_from(["none", "python", "all"]), on_oom=flags),
    budget=st.builds(BudgetConfig, seconds=seconds, spans=st.integers(1, 2**53)),
    export=st.builds(ExportConfig, when=st.sampled_from(["background", "deferred"]), compress=flags),
)


@pytest.mark.slow
@given(configs)
def test_a_config_reads_back_from_its_own_mapping_and_through_json(config: ProfileConfig) -> None:
    mapping = config.to_mapping()
    assert ProfileConfig.from_mapping(mapping) == config
    again = json.loads(json.dumps(mapping))
    assert again == mapping
    assert ProfileConfig.from_mapping(again) == pickle.loads(pickle.dumps(config)) == config
    assert list(again["roles"]) == list(config.roles)  # the first match wins


@pytest.mark.parametrize("given", [{}, {"save_path": "outputs/profile"}])
def test_a_folder_that_was_not_named_stays_so_in_other_processes(given: dict[str, str]) -> None:
    config = ProfileConfig.from_mapping(given)
    assert config.names_folder is bool(given)
    for sent in (ProfileConfig.from_mapping(config.to_settings()), pickle.loads(pickle.dumps(config))):
        assert sent == config
        assert sent.names_folder is bool(given)


def test_the_mapping_of_a_config_reads_like_the_file() -> None:
    mapping = ProfileConfig(steps=[2, "10:50:10"], roles={"actor": {"ranks": [0, 8]}}).to_mapping()
    assert mapping["steps"] == [2, "10:50:10"]
    assert mapping["torch"] == {
        "activities": ["cpu", "cuda"],
        "with_stack": False,
        "record_shapes": False,
        "profile_memory": False,
        "with_flops": False,
        "all_threads": False,
        "schedule": None,
    }


def test_the_typed_settings_name_exactly_the_fields() -> None:
    assert tuple(Settings.__annotations__) == ProfileConfig.__struct_fields__


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        ProfileConfig().mode = "discrete"  # type: ignore[misc]  # what is tested


def test_a_changed_copy_is_checked_and_normalised() -> None:
    config = ProfileConfig(steps=[2], mode="discrete")
    assert config.replace(steps="4:6") == ProfileConfig(steps=[StepRange(4, 6)], mode="discrete")
    assert config.torch.replace(with_stack=True) == TorchConfig(with_stack=True)
    with pytest.raises(ConfigError, match=r"mean 'with_stack'\?"):
        config.torch.replace(with_stak=True)


def test_a_config_keeps_no_hold_of_the_mapping_it_was_made_from() -> None:
    given_roles: dict[str, dict[str, object]] = {"actor": {"ranks": "all"}}
    config = ProfileConfig(roles=given_roles)
    given_roles["env"] = {}
    assert list(config.roles) == ["actor"]


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    assert ProfileConfig(save_path="~/profile").save_path == "/home/anna/profile"


@pytest.mark.parametrize(
    ("data", "helps"),
    [
        ({"stpes": [2]}, r"stpes is \[2\]; allowed: the keys save_path, steps, .*did you mean 'steps'\?"),
        ({"torch": {"with_stak": True}}, r"torch.with_stak is True.*did you mean 'with_stack'\?"),
        ({"torch": {"schedule": {"activ": 1}}}, r"torch.schedule.activ is 1.*did you mean 'active'\?"),
        ({"Steps": [2]}, r"did you mean 'steps'\?"),
        ({"with_stack": True}, r"there is no 'with_stack'; did you mean 'torch.with_stack'\?"),
        ({"step": [2]}, r"there is no 'step'; did you mean 'steps'\?"),
        ({"role": {}}, r"there is no 'role'; did you mean 'roles'\?"),
        ({"ranks": "all"}, r"there is no 'ranks'; did you mean 'roles.<role>.ranks'\?"),
        ({1: 2}, "there is no '1'"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(data: dict[str, object], helps: str) -> None:
    with pytest.raises(ConfigError, match=helps):
        ProfileConfig.from_mapping(data)


@pytest.mark.parametrize(
    ("data", "field", "helps"),
    [
        ({"tool": True}, "tool", "the name of an installed backend. Fix: write tool: torch"),
        ({"tool": " "}, "tool", "the name of an installed backend"),
        ({"mode": "descrete"}, "mode", r"did you mean 'discrete'\?"),
        ({"torch": {"activities": ["gpu"]}}, "torch.activities", "'gpu'.*write one of them"),
        ({"torch": {"activities": "cpu,cdua"}}, "torch.activities", r"did you mean 'cuda'\?"),
        (
            {"torch": {"activities": ["cpu", "cpu"]}},
            "torch.activities",
            r"each activity once. Fix: write \['cpu'\]",
        ),
        ({"torch": {"activities": 3}}, "torch.activities", "a list of 'cpu'"),
        ({"torch": {"activities": [["cpu"]]}}, "torch.activities", "'cpu', 'cuda'"),
        ({"torch": {"with_stack": "yes"}}, "torch.with_stack", "true or false.*without quotes"),
        ({"torch": {"with_stack": 1}}, "torch.with_stack", "true or false"),
        ({"torch": {"with_stack": None}}, "torch.with_stack", "true or false"),
        ({"torch": {"all_threads": []}}, "torch.all_threads", "true or false"),
        ({"torch": True}, "torch", "a mapping with the keys activities, with_stack"),
        ({"torch": None}, "torch", r"write \{\} or leave it out"),
        ({"torch": {"schedule": 2}}, "torch.schedule", "a mapping with the keys skip_first"),
        ({"torch": {"schedule": {"active": 0}}}, "torch.schedule.active", "a whole number >= 1"),
        ({"torch": {"schedule": {"wait": -1}}}, "torch.schedule.wait", "a whole number >= 0"),
        ({"budget": {"seconds": -1}}, "budget.seconds", "a finite number > 0"),
        ({"budget": {"seconds": 0}}, "budget.seconds", "a finite number > 0"),
        ({"budget": {"seconds": float("inf")}}, "budget.seconds", "a finite number > 0"),
        ({"budget": {"seconds": float("nan")}}, "budget.seconds", "a finite number > 0"),
        ({"budget": {"seconds": "300"}}, "budget.seconds", "without quotes"),
        ({"budget": {"trace_mb": 1.5}}, "budget.trace_mb", "a whole number >= 1"),
        ({"budget": {"spans": True}}, "budget.spans", "a whole number >= 1"),
        ({"budget": {"spans": 0}}, "budget.spans", "a whole number >= 1"),
        ({"cuda_memory": {"stacks": "pyhton"}}, "cuda_memory.stacks", r"did you mean 'python'\?"),
        ({"cuda_memory": {"max_entries": 0}}, "cuda_memory.max_entries", "a whole number >= 1"),
        ({"export": {"when": "later"}}, "export.when", "'background' or 'deferred'"),
        ({"counters": {"hz": -1}}, "counters.hz", "<= 100"),
        ({"counters": {"hz": 101}}, "counters.hz", "<= 100"),
        ({"counters": {"hz": "fast"}}, "counters.hz", "<= 100"),
        ({"save_path": ""}, "save_path", "the path of a folder"),
        ({"save_path": " "}, "save_path", "the path of a folder"),
        ({"save_path": "a\0b"}, "save_path", "the path of a folder"),
        ({"save_path": 7}, "save_path", "the path of a folder"),
        ({"save_path": "s3://bucket/runs"}, "save_path", "write a local path"),
        ({"save_path": "file:///data/p"}, "save_path", r"write a local path \(/data/p\)"),
    ],
)
def test_a_wrong_value_names_field_value_allowed_and_fix(
    data: dict[str, object], field: str, helps: str
) -> None:
    with pytest.raises(ConfigError, match=helps) as caught:
        ProfileConfig.from_mapping(data)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")


@pytest.mark.parametrize("data", [None, [], "steps", 3])
def test_what_is_no_mapping_is_no_configuration(data: object) -> None:
    with pytest.raises(ConfigError, match="save_path, steps"):
        ProfileConfig.from_mapping(data)  # type: ignore[arg-type]  # what is tested


def test_v3_validation_survives_python_O() -> None:  # noqa: N802  # -O is its name
    code = """
from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError
for wrong in ({"steps": "5:2"}, {"torch": {"with_stack": 1}}, {"budget": {"seconds": -1}}):
    try:
        ProfileConfig.from_mapping(wrong)
    except ConfigError:
        print("refused", __debug__)
"""
    assert python(code, PYTHONOPTIMIZE="1").splitlines() == ["refused False"] * 3


@pytest.mark.parametrize(
    "data",
    [
        {"torch": {"activities": []}},
        {"torch": {"activities": ""}},
        {"roles": {"actor": {"ranks": []}}},
        {"roles": {}},
    ],
)
def test_v8_an_empty_selection_means_neither_everything_nor_nothing(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"(selects|records) nothing"):
        ProfileConfig.from_mapping(data)
