"""Conversion of a capture's options into a request to SGLang. The functions have no side effects.

Options that would kill or corrupt an engine are refused.

No capture starts at once. Each capture is armed to start with the next forward pass, by `start_step=1`, which
SGLang raises to the number of the next pass. This has three advantages. If other code already runs a profile,
the start raises an error and does not silently replace the profile. The time before the next pass is not
recorded. And `num_steps` is correct in every version: a start at once records one pass too few before 0.5.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope.files.layout import safe
from stepscope_sglang import _versions
from stepscope_sglang._capture.abilities import recorded_activities, why_no_stages
from stepscope_sglang._driving.target import EngineFacts
from stepscope_sglang._engine_side.states import (
    ALONE,
    all_show,
    counts_in,
    v2_in,
    why_not_shown,
)

UNBOUNDED = 1 << 30
"""`num_steps` for a capture by stage without a count. If `num_steps` were absent, the next forward pass would
kill the scheduler."""
_STAGES_BEGIN = "by stage SGLang records from the first pass of each stage on"
_OURS = {
    "output_dir": "save_path",
    "num_steps": "roles.<role>.engine.iterations.count",
    "with_stack": "torch.with_stack",
    "record_shapes": "torch.record_shapes",
    "profile_by_stage": "roles.<role>.engine.by_stage",
    "merge_profiles": "roles.<role>.engine.merge",
    "profile_id": "nothing: it names the files of a capture",
    "req_type": "nothing: it tells a start from a stop",
}
"""{option of SGLang: option of stepscope that sets the option of SGLang}."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine, and the options of the capture that the request leaves out."""

    request: dict[str, object]
    """Fields of the request, without `output_dir`."""
    start: int
    """Number of iterations to skip first; 0 for a capture by stage, which cannot skip iterations."""
    count: int | None
    """Number of iterations after which the engine stops by itself, or None for no limit. For a capture by
    stage, the number of iterations of each stage."""
    by_stage: bool
    merged: bool
    """True if SGLang also writes one file with all ranks."""
    ignored: dict[str, str]
    """{option of the capture: reason why the request leaves it out}"""


def plan(capture: EngineCapture, facts: EngineFacts, states: Sequence[object] = ()) -> Plan:
    """Return the request for an engine.

    Args:
        states: State of each data-parallel scheduler. Needed for captures by stage, for captures without the
            profiler, and if `iterations.start` is above 0.

    Raises:
        EngineError: the engine cannot record this capture. The message has the reason.
    """
    expect_first_profiler(facts, states)
    if not capture.profiler:
        return _plan_of_passes(capture, facts, states)
    ignored: dict[str, str] = {}
    passed = _passed(capture, facts, ignored)
    by_stage = capture.by_stage and _can(ignored, "by_stage", why_no_stages(facts, states))
    count = capture.iterations.count
    merged = capture.merge and _can(ignored, "merge", _why_no_merge(facts, by_stage, passed))
    request: dict[str, object] = {
        "activities": recorded_activities(capture, facts, ignored),
        "with_stack": capture.with_stack and _can(ignored, "with_stack", _why_no_stacks(facts)),
        "record_shapes": capture.record_shapes and _can(ignored, "record_shapes", _forced(facts, "SHAPES")),
        **_window(capture, by_stage, passed, states, ignored),
    }
    if merged:
        request["merge_profiles"] = True
    if "profile_id" in facts.options:
        request["profile_id"] = safe(capture.name)
    request.update(passed)
    return Plan(
        request=request,
        start=0 if by_stage else capture.iterations.start,
        count=count,
        by_stage=by_stage,
        merged=merged,
        ignored=ignored,
    )


def _plan_of_passes(capture: EngineCapture, facts: EngineFacts, states: Sequence[object]) -> Plan:
    """Return a plan for a capture that notes passes without a profile. The plugin notes passes from the
    request on, and keeps the profile from beginning.

    Raises:
        EngineError: a scheduler lacks the plugin, or no passes are wanted.
    """
    since, why = _versions.PLUGINS_SINCE, None
    if _versions.older(facts.version, since):
        why = f"sglang {facts.version} loads no plugin. Fix: sglang {since} or later, or engine.profiler: on"
    elif not all_show(states, ALONE):
        why = why_not_shown(states)
    elif not capture.passes:
        why = "engine.passes is 0. Fix: the number of passes to note, or engine.profiler: on"
    if why is not None:
        raise EngineError(f"roles.rollout.engine.profiler is passes: {why}")
    return Plan(
        request={"activities": ["CPU"], "start_step": UNBOUNDED},
        start=0,
        count=None,
        by_stage=False,
        merged=False,
        ignored={},
    )


def expect_first_profiler(facts: EngineFacts, states: Sequence[object]) -> None:
    """Check that an engine does not use SGLang's second profiler (`SGLANG_PROFILE_V2`).

    That profiler supports only a start by stage. Any other start, and every stop, kills the scheduler.

    Args:
        states: State of each scheduler, as far as the engine shows it.

    Raises:
        EngineError: the engine uses the second profiler.
    """
    if facts.profile_v2 or v2_in(states):
        raise EngineError(
            "SGLANG_PROFILE_V2 is set: under it a plain start, and every stop, kills the scheduler. "
            "Fix: unset it where the engine is started"
        )


def _can(ignored: dict[str, str], option: str, reason: str | None) -> bool:
    if reason is not None:
        ignored[option] = reason
    return reason is None


def _window(
    capture: EngineCapture,
    by_stage: bool,
    passed: dict[str, object],
    states: Sequence[object],
    ignored: dict[str, str],
) -> dict[str, object]:
    wanted, first = capture.iterations, passed.pop("start_step", None)
    if by_stage and wanted.start > 0:
        ignored["iterations.start"] = _STAGES_BEGIN
    if first is not None and (by_stage or wanted.start > 0):
        ignored["extra.start_step"] = _STAGES_BEGIN if by_stage else "iterations.start says where to begin"
    if by_stage:
        return {"profile_by_stage": True, "num_steps": wanted.count or UNBOUNDED}
    if wanted.start > 0:
        first = _count(states, wanted.start) + 1 + wanted.start
    window: dict[str, object] = {"start_step": 1 if first is None else first}
    if wanted.count is not None:
        window["num_steps"] = wanted.count
    return window


def _count(states: Sequence[object], start: int) -> int:
    """Return the number of forward passes that the engine has begun, for the absolute number that SGLang
    expects.

    Raises:
        EngineError: the schedulers do not show their numbers, or the numbers differ.
    """
    passes = counts_in(states)
    if not passes:
        raise EngineError(
            f"iterations.start is {start}: SGLang counts passes from when it started and shows that count to "
            f"nobody before {_versions.PLUGINS_SINCE}. {why_not_shown(states)}; or start: 0"
        )
    if len(set(passes)) > 1:
        raise EngineError(
            f"iterations.start is {start}: the data-parallel schedulers of this engine have begun "
            f"{list(passes)} passes, and SGLang takes one number for all. Fix: start: 0"
        )
    return passes[0]


def _passed(capture: EngineCapture, facts: EngineFacts, ignored: dict[str, str]) -> dict[str, object]:
    """Return the options of `extra` to pass on to the engine's start. Add options without effect to
    `ignored`.

    Raises:
        EngineError: an option is unknown to the engine, is set by stepscope, or has an unusable value.
    """
    passed: dict[str, object] = {}
    for option, value in capture.extra.items():
        if option == "activities":
            continue
        if option in _OURS:
            raise EngineError(
                f"extra.{option} cannot be set: {_OURS[option]} does. Fix: take it out of extra"
            )
        if option not in facts.options:
            raise EngineError(_unknown(option, facts))
        if option == "profile_stages":
            ignored["extra.profile_stages"] = (
                "SGLang heeds it under SGLANG_PROFILE_V2 alone, where a stop kills the scheduler"
            )
            continue
        _expect_usable(option, value)
        passed[option] = value
    return passed


def _expect_usable(option: str, value: object) -> None:
    """Raise EngineError for a value with which SGLang would fail later.

    SGLang accepts any value. With a wrong value, the scheduler dies later, or starts recording at once.
    """
    allowed: str | None = None
    if option == "start_step" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        allowed = "a whole number, 1 or more"
    elif option == "detailed_annotations" and not isinstance(value, bool):
        allowed = "true or false"
    elif option == "profile_prefix" and not _fits_names(value):
        allowed = "letters, digits, `.`, `_` and `-`, and not `merged`, which names SGLang's merged files"
    if allowed is not None:
        raise EngineError(
            f"extra.{option} is {value!r}; allowed: {allowed}. Fix: such a value, or leave it out"
        )


def _fits_names(prefix: object) -> bool:
    fits = isinstance(prefix, str) and prefix != "" and safe(prefix) == prefix
    return fits and not str(prefix).startswith("merged")


def _unknown(option: str, facts: EngineFacts) -> str:
    since = _versions.SINCE.get(option)
    if since is not None:
        return f"sglang {facts.version} has no option {option!r}; {since} has it. Fix: a newer sglang"
    free = sorted((facts.options | {"activities"}) - _OURS.keys())
    return f"sglang {facts.version} has no option {option!r}; extra can hold: {', '.join(free)}"


def _why_no_stacks(facts: EngineFacts) -> str | None:
    if not facts.sleep_on_idle:
        return (
            "an idle scheduler spins, and with stacks takes 22 GB in 8 s. Fix: start the engine with "
            "sleep_on_idle=True"
        )
    return _forced(facts, "STACK")


def _forced(facts: EngineFacts, word: str) -> str | None:
    return next((f"{name} is off for this engine" for name in facts.forced_off if word in name), None)


def _why_no_merge(facts: EngineFacts, by_stage: bool, passed: Mapping[str, object]) -> str | None:
    ours = "`stepscope merge` joins the files"
    if "merge_profiles" not in facts.options:
        since = _versions.SINCE["merge_profiles"]
        return f"sglang {facts.version} has no merge_profiles; {since} has it; {ours}"
    if facts.dp > 1 or facts.pp > 1:
        return f"SGLang merges before the other dp and pp ranks have written; {ours}"
    if by_stage:
        return f"SGLang merges both stages into one, under the same process ids; {ours}"
    if passed.get("profile_prefix"):
        return f"SGLang finds no file to merge when they have a prefix; {ours}"
    return None
