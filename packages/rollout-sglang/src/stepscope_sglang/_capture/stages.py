"""Captures by stage and captures of pipelines: conditions under which a scheduler survives them."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope_sglang import _versions
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._engine_side.states import (
    scopes_end_in,
    sends_quiet_in,
    why_not_shown,
)


def lacks_plugin(facts: EngineFacts, states: Sequence[object]) -> bool:
    """Return whether captures may kill schedulers of this pipeline, which have not loaded our plugin."""
    return facts.pp > 1 and not sends_quiet_in(states)


def risk_of_whole_captures(facts: EngineFacts, states: Sequence[object]) -> str:
    """Return the warning for a pipeline that `lacks_plugin`."""
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
    """Return whether SGLang stops one stage's profile and starts the next inside of a scope.

    That scope is a `record_function`, or that of a send between pipeline ranks.
    """
    return facts.pp > 1 or not _versions.older(facts.version, _versions.SCOPED_BATCHES_SINCE)


def why_no_stages(facts: EngineFacts, states: Sequence[object]) -> str | None:
    """Return the reason why stages cannot be told apart; None if they can."""
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
    if not _versions.older(facts.version, _versions.SCOPED_BATCHES_SINCE) and not scopes_end_in(states):
        return (
            f"sglang {facts.version} stops the profile of one stage and starts the next inside of a "
            "record_function, and torch then writes into freed memory: the scheduler dies, some captures "
            f"later. {why_not_shown(states)}"
        )
    return None
