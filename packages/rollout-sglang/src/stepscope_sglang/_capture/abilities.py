"""Abilities of an engine: which activities its device can record, and which captures are safe.

Captures by stage, and captures of pipelines, may kill a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._driving.target import EngineFacts
from stepscope_sglang._engine_side.states import (
    RPD_LIBRARY,
    SCOPES_END,
    SENDS_QUIET,
    all_show,
    why_not_shown,
)

_TORCH = {"cpu": "CPU", "cuda": "GPU", "xpu": "XPU"}

_FURTHER = ("CUDA_PROFILER", "RPD")
"""Activities of `extra.activities` that are not part of torch.profiler."""


def recorded_activities(capture: EngineCapture, facts: EngineFacts, ignored: dict[str, str]) -> list[str]:
    """Return the activities that the engine's device can record. Any other activity would kill its scheduler.

    Args:
        ignored: Receives the reasons for the activities that are left out.

    Raises:
        EngineError: no activity can be recorded, or `extra.activities` has an activity that the engine cannot
            record.
    """
    taken, reasons = [], []
    for activity in capture.activities:
        reason = _why_not_recorded(activity, facts)
        if reason is None:
            taken.append(_TORCH[activity])
        else:
            reasons.append(f"{activity}: {reason}")
    if reasons:
        ignored["activities"] = "; ".join(reasons)
    if not taken:
        raise EngineError(
            f"none of the activities {list(capture.activities)} can be recorded ({'; '.join(reasons)}): "
            "SGLang would record nothing, or die. Fix: torch.activities: [cpu]"
        )
    if capture.profile_memory:
        reason = _why_no_memory(facts)
        if reason is None:
            taken.append("MEM")
        else:
            ignored["profile_memory"] = reason
    return taken + _further(capture, facts)


def _why_not_recorded(activity: str, facts: EngineFacts) -> str | None:
    if activity not in _TORCH:
        return "SGLang records cpu, cuda and xpu"
    if activity == "xpu" and _versions.older(facts.version, _versions.XPU_SINCE):
        return f"sglang {facts.version} does not know it; {_versions.XPU_SINCE} does"
    if activity not in ("cpu", facts.device):
        return f"the engine runs on {facts.device}"
    return None


def _why_no_memory(facts: EngineFacts) -> str | None:
    return (
        None
        if facts.device == "cuda"
        else f"SGLang records memory of cuda; this engine runs on {facts.device}"
    )


def _further(capture: EngineCapture, facts: EngineFacts) -> list[str]:
    asked = str(capture.extra.get("activities") or "").replace(",", " ").split()
    for activity in asked:
        if activity not in _FURTHER:
            raise EngineError(
                f"extra.activities is {activity!r}; allowed: {', '.join(_FURTHER)}. Fix: torch.activities "
                "and torch.profile_memory for the others"
            )
        if facts.device != "cuda":
            raise EngineError(
                f"extra.activities: {activity} kills an engine on {facts.device}. Fix: leave it out"
            )
        if activity == "RPD" and not facts.rpd:
            state = "the engine runs without" if facts.rpd is False else "this server does not say it has"
            raise EngineError(
                f"extra.activities: RPD kills an engine without {RPD_LIBRARY}: {state} it. "
                "Fix: install rpd where the engine runs (a server says so by our plugin)"
            )
    return asked


def lacks_plugin(facts: EngineFacts, states: Sequence[object]) -> bool:
    """Return whether the engine is a pipeline whose schedulers have not loaded stepscope's plugin, so that
    captures may kill the schedulers.
    """
    return facts.pp > 1 and not all_show(states, SENDS_QUIET)


def risk_of_whole_captures(facts: EngineFacts, states: Sequence[object]) -> str:
    """Return the warning for a pipeline for which `lacks_plugin` is True."""
    return (
        f"schedulers of this pipeline of sglang {facts.version} may die in torch's profiler after some "
        "captures (of 0.5.23 seen at the 16th and the 21st in a row, under load). "
        f"{_what_pipelines_take(facts, states)}"
    )


def _what_pipelines_take(facts: EngineFacts, states: Sequence[object]) -> str:
    since = _versions.PLUGINS_SINCE
    if _versions.older(facts.version, since):
        return (
            f"Our plugin prevents that, and sglang {facts.version} does not load it. "
            f"Fix: sglang {since} or later"
        )
    return why_not_shown(states)


def stages_end_in_scopes(facts: EngineFacts) -> bool:
    """Return whether SGLang stops one stage's profile and starts the next profile inside an open scope.

    The scope is a `record_function`, or a send between pipeline ranks.
    """
    return facts.pp > 1 or not _versions.older(facts.version, _versions.SCOPED_BATCHES_SINCE)


def why_no_stages(facts: EngineFacts, states: Sequence[object]) -> str | None:
    """Return the reason why the engine cannot be captured by stage, or None if it can."""
    if facts.speculative:
        return "with speculative decoding SGLang's stages do not end, or kill the scheduler"
    since = _versions.DECODE_SERVER_BY_STAGE_SINCE
    if facts.disaggregation == "decode" and _versions.older(facts.version, since):
        return f"it kills a decode server of sglang {facts.version}; {since} can do it"
    if lacks_plugin(facts, states):
        return (
            "one stage's profile is stopped and the next one started while a pipeline rank's sends are under "
            "way, and torch then writes into freed memory: the scheduler dies at the next "
            f"capture. {_what_pipelines_take(facts, states)}"
        )
    scoped = not _versions.older(facts.version, _versions.SCOPED_BATCHES_SINCE)
    if scoped and not all_show(states, SCOPES_END):
        return (
            f"sglang {facts.version} stops the profile of one stage and starts the next inside of a "
            "record_function, and torch then writes into freed memory: the scheduler dies, some captures "
            f"later. {why_not_shown(states)}"
        )
    return None
