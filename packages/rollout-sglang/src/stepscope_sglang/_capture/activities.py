"""Activities of a capture, in SGLang's words: those that the engine's device can record."""

from __future__ import annotations

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._engine_side.states import (
    RPD_LIBRARY,
)

_TORCH = {"cpu": "CPU", "cuda": "GPU", "xpu": "XPU"}

_FURTHER = ("CUDA_PROFILER", "RPD")
"""Activities that are no part of torch.profiler, by `extra.activities`."""


def recorded_activities(capture: EngineCapture, facts: EngineFacts, ignored: dict[str, str]) -> list[str]:
    """Return the activities that the engine's device can record. Any other one would kill its scheduler.

    Args:
        ignored: Receives the reasons for those that are left out.

    Raises:
        EngineError: none can be recorded, or `extra.activities` has one that cannot.
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
