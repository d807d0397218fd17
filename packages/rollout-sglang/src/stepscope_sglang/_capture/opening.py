"""The opening of a recording: the request for the engine, and whether it can still be met in time."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_sglang._capture.checks import warn
from stepscope_sglang._capture.options import plan
from stepscope_sglang._capture.recording import Recording
from stepscope_sglang._capture.stages import lacks_plugin, risk_of_whole_captures, stages_end_in_scopes
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._driving.target import Target
from stepscope_sglang._engine_side.states import counts_in
from stepscope_sglang._files.capture_folder import CaptureFolder


def prepared(target: Target, capture: EngineCapture, label: str | None) -> Recording:
    """Plan a recording. Nothing is armed yet, and its folder is not made.

    Raises:
        EngineError: the engine cannot record this at all, and why.
    """
    facts = target.facts()
    states = _states(target, capture, facts)
    planned = plan(capture, facts, states)
    if lacks_plugin(facts, states):
        warn(risk_of_whole_captures(facts, states))
    return Recording(
        capture=capture,
        label=label,
        remote=target.remote,
        facts=facts,
        plan=planned,
        folder=CaptureFolder(Path(capture.out_dir, f".sglang-{uuid.uuid4().hex[:12]}")),
        ignored=dict(planned.ignored),
        passes_before=counts_in(states),
    )


def _states(target: Target, capture: EngineCapture, facts: EngineFacts) -> Sequence[object]:
    """Ask the schedulers for their states, where a plan depends on them."""
    later = capture.iterations.start > 0
    by_stage = capture.by_stage and stages_end_in_scopes(facts)
    if not (later or by_stage or facts.pp > 1):
        return ()
    try:
        return target.states()
    except EngineError:
        if later:
            raise
        return ()  # an engine that does not answer counts as one without our plugin


def note_late_start(recording: Recording, target: Target) -> None:
    """Note if the engine has already passed the iteration at which recording was to begin."""
    first = recording.plan.request["start_step"]
    try:
        begun = max(counts_in(target.states()), default=0)
    except Exception as error:  # of any library: it is armed, and its end shows the rest
        recording.ignored["iterations.start"] = (
            f"whether recording began later than at pass {first} is not known: "
            f"{type(error).__name__}: {error}"
        )
        return
    if isinstance(first, int) and begun >= first:
        recording.ignored["iterations.start"] = (
            f"the engine ran to pass {begun} while it was told to begin at pass {first}: recording may "
            "have begun later"
        )
