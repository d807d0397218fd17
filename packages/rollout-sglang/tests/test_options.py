"""Requests to SGLang for a capture, and options that are not sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engines import supported
from stepscope.engines.protocol import Iterations
from stepscope.engines.supported import supported_by
from stepscope.errors import EngineError
from stepscope.testing.engine_conformance import a_capture
from stepscope_sglang import _versions
from stepscope_sglang._capture.opening import check_facts, check_options
from stepscope_sglang._capture.options import Plan, plan
from stepscope_sglang._driving.target import EngineFacts, facts_of
from stepscope_sglang._engine_side.states import (
    COUNT,
    PROFILE_V2,
    SCOPES_END,
    SENDS_QUIET,
    VERSION,
    own_version,
)


def an_engine(version: str = "0.5.23", **settings: Any) -> EngineFacts:
    given = {"device": "cuda", "sleep_on_idle": True, **settings}
    return facts_of(given, version=version, options=_versions.options_of(version))


def told(facts: EngineFacts, passes: tuple[int, ...] = (), plugin: bool = True, **changes: Any) -> Plan:
    capture = msgspec.structs.replace(a_capture(Path("/p")), activities=("cpu", "cuda"))
    states: list[dict[str, object]] = [{COUNT: count} for count in passes] or [{}]
    shown = [{**state, SCOPES_END: plugin, SENDS_QUIET: plugin} for state in states]
    return plan(msgspec.structs.replace(capture, **changes), facts, shown)


def test_what_is_heavy_is_off_by_default() -> None:
    assert told(an_engine()).request == {
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
        "start_step": 1,
        "profile_id": "capture-step1",
    }


def test_every_control_has_its_word() -> None:
    plan = told(
        an_engine(),
        activities=("cpu", "cuda"),
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
        merge=True,
        iterations=Iterations(count=4),
        extra={"detailed_annotations": True, "activities": "CUDA_PROFILER"},
    )
    assert plan.request == {
        "activities": ["CPU", "GPU", "MEM", "CUDA_PROFILER"],
        "with_stack": True,
        "record_shapes": True,
        "start_step": 1,
        "num_steps": 4,
        "merge_profiles": True,
        "profile_id": "capture-step1",
        "detailed_annotations": True,
    }
    assert not plan.ignored


def test_stages_always_have_a_number() -> None:
    request = told(an_engine(), by_stage=True).request
    assert request["num_steps"] == 1 << 30
    assert "start_step" not in request


def test_an_absolute_first_pass_goes_through() -> None:
    request = told(an_engine(), extra={"start_step": 4000}, iterations=Iterations(count=2)).request
    assert (request["start_step"], request["num_steps"]) == (4000, 2)


@pytest.mark.parametrize("passes", [(40,), (40, 40)])
def test_a_later_start_is_counted_from_the_passes_that_were_begun(passes: tuple[int, ...]) -> None:
    request = told(an_engine(), passes, iterations=Iterations(start=3, count=2)).request
    assert (request["start_step"], request["num_steps"]) == (44, 2)


@pytest.mark.parametrize(
    ("passes", "changes", "message"),
    [
        (
            (),
            {},
            r"shows that count to nobody.*0\.5\.11.*Fix: install stepscope-rollout-sglang where",
        ),
        ((40, 7), {}, r"have begun \[40, 7\] passes"),
    ],
)
def test_a_later_start_that_cannot_be_counted_is_refused(
    passes: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        told(an_engine(), passes, iterations=Iterations(start=3), **changes)


@pytest.mark.parametrize(
    "start", [{"iterations": Iterations(start=1, count=3)}, {"extra": {"start_step": 9}}]
)
def test_stages_begin_with_their_first_pass_whatever_start_is_asked_for(start: dict[str, Any]) -> None:
    made = told(an_engine(), (40,), by_stage=True, **start)
    assert (made.by_stage, made.start) == (True, 0)
    assert "start_step" not in made.request
    assert list(made.ignored) == ["iterations.start" if "iterations" in start else "extra.start_step"]


def test_a_start_from_now_comes_before_an_absolute_one() -> None:
    made = told(an_engine(), (40,), iterations=Iterations(start=3), extra={"start_step": 9})
    assert (made.request["start_step"], list(made.ignored)) == (44, ["extra.start_step"])


def test_options_are_checked_before_the_run_without_asking_the_schedulers() -> None:
    capture = msgspec.structs.replace(a_capture(Path("/p")), activities=("cuda",), by_stage=True)
    started = msgspec.structs.replace(capture, iterations=Iterations(start=1, count=3))
    assert list(check_options(started, an_engine())) == ["iterations.start"]
    with pytest.raises(EngineError, match="extra can hold"):
        check_options(msgspec.structs.replace(capture, extra={"depth": 3}), an_engine())


@pytest.mark.parametrize(
    ("option", "version", "since"),
    [("detailed_annotations", "0.5.18", "0.5.19"), ("profile_prefix", "0.5.5", "0.5.6")],
)
def test_what_a_version_lacks_is_an_error_that_names_the_one_that_has_it(
    option: str, version: str, since: str
) -> None:
    with pytest.raises(EngineError, match=f"sglang {version} has no option '{option}'; {since} has it"):
        told(an_engine(version), extra={option: "x"})


def test_an_option_that_nobody_knows_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(EngineError, match="activities, detailed_annotations"):
        told(an_engine(), extra={"depth": 3})


@pytest.mark.parametrize(
    ("settings", "changes", "option", "message"),
    [
        ({"sleep_on_idle": False}, {"with_stack": True}, "with_stack", "22 GB in 8 s"),
        ({"device": "cpu"}, {}, "activities", "cuda: the engine runs on cpu"),
        ({"device": "cpu"}, {"profile_memory": True}, "profile_memory", "this engine runs on cpu"),
        ({"dp_size": 2}, {"merge": True}, "merge", "before the other dp and pp ranks"),
        ({"pp_size": 2}, {"merge": True}, "merge", "before the other dp and pp ranks"),
        ({}, {"merge": True, "by_stage": True}, "merge", "same process ids"),
        ({}, {"merge": True, "extra": {"profile_prefix": "x"}}, "merge", "have a prefix"),
        ({"speculative_algorithm": "EAGLE"}, {"by_stage": True}, "by_stage", "speculative decoding"),
        ({}, {"extra": {"profile_stages": "decode"}}, "extra.profile_stages", "SGLANG_PROFILE_V2"),
    ],
)
def test_what_would_go_wrong_is_left_out_with_its_reason(
    settings: dict[str, Any], changes: dict[str, Any], option: str, message: str
) -> None:
    plan = told(an_engine(**settings), **changes)
    assert message in plan.ignored[option]
    assert "merge_profiles" not in plan.request
    assert "MEM" not in str(plan.request)


@pytest.mark.parametrize(("version", "can"), [("0.5.20", False), ("0.5.21", True)])
def test_a_decode_server_tells_stages_apart_from_0_5_21_on(version: str, can: bool) -> None:
    plan = told(an_engine(version, disaggregation_mode="decode"), by_stage=True)
    assert plan.by_stage is can
    assert ("by_stage" in plan.ignored) is not can


@pytest.mark.parametrize(("version", "can"), [("0.5.13", True), ("0.5.14", False), ("0.5.23", False)])
def test_stages_that_end_in_a_scope_take_the_plugin(version: str, can: bool) -> None:
    plan = told(an_engine(version), plugin=False, by_stage=True)
    assert plan.by_stage is can
    assert ("freed memory" in plan.ignored.get("by_stage", "")) is not can
    assert told(an_engine(version), plugin=True, by_stage=True).by_stage


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("0.5.8", "Fix: sglang 0.5.11 or later"),
        ("0.5.12", "Fix: install stepscope-rollout-sglang where the engine runs"),
        ("0.5.23", "Fix: install stepscope-rollout-sglang where the engine runs"),
    ],
)
def test_stages_of_a_pipeline_take_the_plugin(version: str, fix: str) -> None:
    """Versions before 0.5.11 load no plugin."""
    facts = an_engine(version, pp_size=2)
    refused = told(facts, plugin=False, by_stage=True)
    assert "sends are under" in refused.ignored["by_stage"]
    assert fix in refused.ignored["by_stage"]
    assert told(facts, plugin=True, by_stage=True).by_stage


@pytest.mark.parametrize(
    ("shown", "release"), [({}, "without a version"), ({VERSION: "0.0.9"}, r"0\.0\.9")], ids=str
)
def test_an_older_plugin_is_to_be_upgraded_and_not_installed(shown: dict[str, object], release: str) -> None:
    capture = msgspec.structs.replace(a_capture(Path("/p")), by_stage=True)
    reason = plan(capture, an_engine(device="cpu"), [{COUNT: 3, **shown}]).ignored["by_stage"]
    upgrade = (
        rf"loaded stepscope-rollout-sglang {release}, which is too old for it; this process has "
        rf"{own_version()}\. Fix: install the same"
    )
    assert re.search(upgrade, reason)
    assert "not loaded" not in reason


def test_no_mode_of_the_second_profiler_is_begun() -> None:
    capture = a_capture(Path("/p"))
    for by_stage in (False, True):
        with pytest.raises(EngineError, match="SGLANG_PROFILE_V2"):
            plan(msgspec.structs.replace(capture, by_stage=by_stage), an_engine(), [{PROFILE_V2: True}])


@pytest.mark.parametrize(
    ("has", "message"), [(None, "does not say it has"), (False, "the engine runs without")], ids=str
)
def test_rpd_takes_its_library_where_the_engine_runs(has: bool | None, message: str) -> None:
    facts = msgspec.structs.replace(an_engine(), rpd=has)
    with pytest.raises(EngineError, match=f"rpdTracerControl: .*{message}"):
        told(facts, extra={"activities": "RPD"})
    has_it = msgspec.structs.replace(facts, rpd=True)
    assert told(has_it, extra={"activities": "RPD"}).request["activities"] == ["CPU", "GPU", "RPD"]


def test_a_version_without_merging_says_which_has_it() -> None:
    assert "0.5.4 has it" in told(an_engine("0.5.3"), merge=True).ignored["merge"]


def test_switches_of_the_environment_are_known() -> None:
    facts = msgspec.structs.replace(an_engine(), forced_off=frozenset({"SGLANG_PROFILE_WITH_STACK"}))
    plan = told(facts, with_stack=True, record_shapes=True)
    assert list(plan.ignored) == ["with_stack"]
    assert (plan.request["with_stack"], plan.request["record_shapes"]) == (False, True)


@pytest.mark.parametrize("activity", ["xpu", "mtia", "hpu", "privateuse1"])
def test_an_activity_alone_that_the_engine_lacks_is_an_error(activity: str) -> None:
    with pytest.raises(EngineError, match=r"torch\.activities: \[cpu\]"):
        told(an_engine(), activities=(activity,))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"activities": "CUDA_PROFILER"}, "kills an engine"),
        ({"activities": "RPD"}, "kills an engine"),
        ({"activities": "MEM"}, "profile_memory"),
        ({"num_steps": 3}, "iterations.count"),
    ],
)
def test_what_would_kill_or_mislead_the_engine_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        told(an_engine(device="cpu"), activities=("cpu",), extra=extra)


def test_xpu_is_for_xpu_from_0_5_10_on() -> None:
    both = ("cpu", "xpu")
    assert told(an_engine(device="xpu"), activities=both).request["activities"] == ["CPU", "XPU"]
    assert "0.5.10 does" in told(an_engine("0.5.9", device="xpu"), activities=both).ignored["activities"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("start_step", "100"),
        ("start_step", 0),
        ("start_step", True),
        ("profile_prefix", "run/7"),
        ("profile_prefix", 7),
        ("profile_prefix", ""),
        ("profile_prefix", "merged"),
        ("detailed_annotations", "false"),
    ],
)
def test_a_value_that_the_scheduler_would_die_of_is_refused(option: str, value: Any) -> None:
    with pytest.raises(EngineError, match=rf"extra\.{option} is .*allowed: .*Fix: "):
        told(an_engine(), extra={option: value})


# The tests below show that the `engine` extra of this distribution is the range that is checked at run time.


def test_an_engine_above_the_range_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    supported._warn.cache_clear()
    _versions.check("99.0.0")
    (record,) = caplog.records
    assert f"newer than {supported_by(_versions.ADAPTER)}" in record.getMessage()


def test_an_engine_below_the_range_is_refused() -> None:
    with pytest.raises(EngineError, match="pip install 'sglang>="):
        _versions.check("0.0.1")


# SGLang on an NPU is refused before the run, with a fix. It was never run, because no NPU was available.


def test_an_engine_on_an_npu_is_refused_with_the_tool_that_records_it() -> None:
    facts = EngineFacts(
        version="0.5.23",
        options=frozenset(),
        device="npu",
        tp=1,
        dp=1,
        pp=1,
        dp_attention=False,
        sleep_on_idle=True,
        speculative=False,
        disaggregation=None,
        metrics=False,
    )
    with pytest.raises(EngineError, match="the tool npu"):
        check_facts(facts)
