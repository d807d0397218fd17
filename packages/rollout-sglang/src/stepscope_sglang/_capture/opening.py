"""The start of a recording: checks of the engine, the plan, and whether the start came too late."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._capture.abilities import lacks_plugin, risk_of_whole_captures, stages_end_in_scopes
from stepscope_sglang._capture.options import expect_first_profiler, plan
from stepscope_sglang._capture.outcome import Recording
from stepscope_sglang._driving.target import EngineFacts, Target
from stepscope_sglang._engine_side.states import ALONE, COUNT, SCOPES_END, SENDS_QUIET, counts_in
from stepscope_sglang._files.capture_folder import CaptureFolder

log = logging.getLogger("stepscope")
_warned: set[str] = set()
"""Warnings that were logged. One writer: `warn`."""


def check_facts(facts: EngineFacts) -> None:
    """Raise EngineError for an engine that cannot be recorded at all. Log a warning for an engine that
    captures may kill.
    """
    _versions.check(facts.version)
    expect_first_profiler(facts, ())
    if facts.device == "npu":
        raise EngineError(
            "on npu SGLang writes the folders of the Ascend profiler, which this adapter does not read. "
            "Fix: record those processes with the tool npu"
        )
    since = _versions.DP_ATTENTION_SINCE
    if facts.dp_attention and _versions.older(facts.version, since):
        raise EngineError(
            f"with attention data-parallel sglang {facts.version} never answers a start. "
            f"Fix: sglang {since} or later"
        )
    if _versions.may_crash_soon(facts.version):
        warn(
            f"sglang {facts.version} may crash after a few captures (0.5.14 at the fifth, 0.5.16 before the "
            "fourteenth). Fix: sglang 0.5.18 or later"
        )
    if not facts.sleep_on_idle:
        warn(
            "the idle schedulers of this SGLang engine spin, and every turn is recorded (43000 events a "
            "second). Fix: start the engine with sleep_on_idle=True (--sleep-on-idle)"
        )


def check_options(capture: EngineCapture, facts: EngineFacts) -> dict[str, str]:
    """Return {option: reason} for the options of a capture that have no effect. The schedulers are not asked
    for their state; all schedulers are assumed to have the plugin.

    Raises:
        EngineError: the engine cannot record this capture even with the plugin. The message has the reason.
    """
    return plan(capture, facts, ({COUNT: 0, SCOPES_END: True, SENDS_QUIET: True, ALONE: True},)).ignored


def warn(text: str) -> None:
    """Log a warning, unless this process has already logged it."""
    if text not in _warned:
        _warned.add(text)
        log.warning("stepscope: %s", text)


def prepared(target: Target, capture: EngineCapture, label: str | None) -> Recording:
    """Return a planned recording. The profiler is not started, and the folder is not made.

    Raises:
        EngineError: the engine cannot record this capture. The message has the reason.
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
    """Return the states of the schedulers. Empty if the plan does not depend on states."""
    later = capture.iterations.start > 0 and not capture.by_stage
    by_stage = capture.by_stage and stages_end_in_scopes(facts)
    if not (later or by_stage or facts.pp > 1 or not capture.profiler):
        return ()
    try:
        return target.states()
    except EngineError:
        if later or not capture.profiler:
            raise
        return ()  # an engine that does not answer is treated like an engine without the plugin


def note_late_start(recording: Recording, target: Target) -> None:
    """Add a note if the engine has already passed the iteration at which recording should begin."""
    first = recording.plan.request["start_step"]
    try:
        begun = max(counts_in(target.states()), default=0)
    # Any library may raise; the recording has begun, and an error here must not end the recording.
    except Exception as error:
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
