"""The cause of a recording's end, and whether the recording is complete, as its files show.

SGLang does not report the cause. Its answer to a stop is the same if the recording has already ended and if
the recording has not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import stalls_of
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import Ended, Stall
from stepscope_sglang._capture.options import Plan
from stepscope_sglang._driving.target import EngineFacts
from stepscope_sglang._engine_side.states import Stamp, counts_in, stages_in, stamps_in
from stepscope_sglang._files.capture_folder import CaptureFolder, Content, File, Stage, TraceName

State: TypeAlias = Literal["armed", "stopped", "by itself", "by others", "unused"]
"""
armed       SGLang records from the next forward pass on
stopped     stepscope's stop ended the recording
by itself   the recording had reached its count before the stop
by others   other code had stopped the recording before the stop
unused      no forward pass ran, so nothing was recorded and no file is missing

A recording changes its state once, from `armed` to another state."""


@dataclass(kw_only=True)
class Recording:
    """State of one recording. Only the session changes the state; code that publishes files reads it."""

    capture: EngineCapture
    label: str | None
    """Text in the file names that distinguishes the engines of a replica; None if there is one engine."""
    remote: bool
    """True if the engine is not a child of this process."""
    facts: EngineFacts
    plan: Plan
    folder: CaptureFolder
    ignored: dict[str, str]
    """{option without effect, or missing part: reason}"""
    passes_before: tuple[int, ...]
    """Number of forward passes that each scheduler had begun before the start; empty if unknown."""
    state: State = "armed"
    expired: str | None = None
    """Reason why stepscope stopped the profiler before the end of the capture, or None."""
    failure: str | None = None
    """Error of the stop, after which the engine may still be writing or is dead; None if the stop worked."""
    opened: ClockAnchor | None = None
    closed: ClockAnchor | None = None
    states: Sequence[object] = ()
    """States of the schedulers after the end of the recording; empty if unknown."""
    published: list[TraceName] = field(default_factory=list)
    """Names of the files that have been published."""

    @property
    def is_bounded(self) -> bool:
        """Return whether SGLang stops by itself after a number of iterations."""
        return self.plan.count is not None

    @property
    def is_idle(self) -> bool:
        """Return whether the engine ran no forward pass. A recording without files is then complete."""
        if self.state != "unused" or self.failure is not None:
            return False
        if self.plan.start > 0:
            return counts_in(self.states) == self.passes_before
        return not self.ran_without_stages

    @property
    def ran_without_stages(self) -> bool:
        """Return True if the engine is known to have run passes in a capture by stage.

        If no stage's recording began although passes ran, the engine refuses the stop (with 500). Return
        False with DP attention, because idle passes belong to no stage.
        """
        before, now = self.passes_before, counts_in(self.states)
        return self.plan.by_stage and not self.facts.dp_attention and () not in (before, now) and now > before

    def files(self) -> list[File]:
        """Return the recording's files; after a failure, only the complete files."""
        files = self.folder.files()
        return files if self.failure is None else [file for file in files if self.folder.is_complete(file)]

    def stamps(self) -> list[Stamp]:
        """Return the times in which the schedulers' profilers started and wrote."""
        return stamps_in(self.states, str(self.folder.path))


_ENDED: dict[State, Ended] = {"stopped": "capture", "by itself": "count", "by others": "others"}
_ONE_AT_A_TIME = "SGLang ends the recording of prefill when decoding begins"


def has_stopped_by_itself(recording: Recording) -> bool:
    """Return whether the recording has ended at its count, because all files exist and are complete."""
    files, world_size = recording.files(), recording.facts.world_size
    stages: tuple[Stage | None, ...] = ("prefill", "decode") if recording.plan.by_stage else (None,)
    for stage in stages:
        if sum(file.name.stage == stage and file.is_trace for file in files) < world_size:
            return False
    if recording.plan.merged and not any(file.name.kind == "merged_trace" for file in files):
        return False
    return all(recording.folder.is_complete(file) for file in files)


def state_before_stop(recording: Recording) -> State:
    """Return the state of a recording that had ended, or had not begun, before stepscope's stop.

    If there are several data-parallel schedulers, only the answer of the first scheduler is known; the other
    schedulers may have run fewer passes.
    """
    files = recording.files()
    if not files:
        return "unused"
    if recording.facts.dp > 1:
        return "by itself" if recording.is_bounded else "stopped"
    if not recording.is_bounded:
        return "by others"
    traces = [file for file in files if file.is_trace]
    if recording.plan.by_stage:
        cut = any(file.name.stage is None for file in traces)
    else:
        passes = max((recording.folder.content(file).passes for file in traces), default=0)
        cut = 0 < passes < (recording.plan.count or 0)
    return "by others" if cut else "by itself"


def is_disarmed(recording: Recording) -> bool:
    """Return True if the engine is known to have no recording that runs or waits for its start."""
    if recording.state == "unused" or recording.facts.dp > 1:
        return False
    stages = {file.name.stage for file in recording.files()}
    return not recording.plan.by_stage or ("prefill" in stages and len(stages) > 1)


def ended_by(recording: Recording) -> Ended | None:
    """Return the cause of the recording's end, or None if unknown."""
    if recording.failure is not None or recording.state not in _ENDED:
        return None
    return "budget" if recording.expired else _ENDED[recording.state]


def why_truncated(recording: Recording, content: Content) -> str | None:
    """Return the reason why a file is incomplete, or ends before the capture although the engine ran on. None
    for other files.
    """
    if not content.complete:
        return "SGLang did not finish writing it"
    if recording.state != "by others":
        return recording.expired
    more = _passes_since(recording, content)
    if more == 0:
        return None
    ran = "how many more it ran is not known" if more is None else f"it ran {more} more"
    return f"{_stopped_by_others(recording, content)}; {ran}"


def note(recording: Recording, content: Content, stage: Stage | None) -> str | None:
    """Return a note about a complete file that ended early or has fewer iterations than requested, or None.

    If the engine ran iterations that the file lacks, return None, and add the reason to `recording.ignored`.
    """
    if recording.state == "by others":
        over = _passes_since(recording, content) == 0
        return f"{_stopped_by_others(recording, content)}; it ran no more" if over else None
    count, mixed = recording.plan.count, recording.plan.by_stage and stage is None
    if count is None or mixed or recording.expired:
        return None
    kind = f"{stage} iterations" if stage else "engine iterations"
    if not content.passes:
        cut = recording.state != "by itself"
        return f"fewer than {count} {kind}: the engine ran no more" if cut else None
    if content.passes >= count:
        return None
    return _note_of_fewer(recording, content.passes, count, stage, kind)


def _note_of_fewer(
    recording: Recording, passes: int, count: int, stage: Stage | None, kind: str
) -> str | None:
    ran = _passes_of(recording, stage)
    if ran is not None and ran > passes:
        recording.ignored["iterations.count"] = (
            f"{passes} of {count} {kind} were recorded, and {ran} ran: {_ONE_AT_A_TIME}"
        )
        return None
    if ran is None and stage == "prefill":
        return f"{passes} of {count} {kind}: {_ONE_AT_A_TIME}"
    return f"{passes} of {count} {kind}: the engine ran no more"


def stalls(recording: Recording, path: Path, content: Content) -> tuple[Stall, ...]:
    """Return the times in which the engine served nothing because its profiler started or wrote this
    trace.
    """
    stamped = [
        Stall(start_ns=stamp.start_ns, end_ns=stamp.end_ns, doing=stamp.doing, source="stamps")
        for stamp in recording.stamps()
        if stamp.pid == content.pid
    ]
    return stalls_of(content.window, stamped, path.stat().st_mtime_ns)


def _stopped_by_others(recording: Recording, content: Content) -> str:
    when = f"after {content.passes} engine iterations" if content.passes else "early"
    count = recording.plan.count
    wanted = "" if count is None else f" of the {count} asked for"
    return f"somebody else stopped the engine's profiler {when}{wanted}"


def _passes_since(recording: Recording, content: Content) -> int | None:
    """Return the number of forward passes after the end of a file's recording, or None if unknown."""
    counts = counts_in(recording.states)
    stamps = [stamp for stamp in recording.stamps() if stamp.doing == "writing" and stamp.pid == content.pid]
    return counts[0] - stamps[-1].passes if len(counts) == 1 and stamps else None


def _passes_of(recording: Recording, stage: Stage | None) -> int | None:
    """Return the number of passes of a stage during the capture, by the engine's own counter, or None if
    unknown.
    """
    shown = [stages for stages in stages_in(recording.states) if stages is not None]
    return shown[0].get(stage) if stage is not None and len(shown) == 1 else None
