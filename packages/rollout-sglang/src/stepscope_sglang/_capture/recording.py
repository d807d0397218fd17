"""State of one recording of an engine, from its start to the last of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stepscope.engines import EngineCapture
from stepscope.files.clock import ClockAnchor
from stepscope_sglang._capture.options import Plan
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._engine_side.states import Stamp, counts_in, stamps_in
from stepscope_sglang._files.capture_folder import CaptureFolder, File
from stepscope_sglang._files.traces import TraceName

State: TypeAlias = Literal["armed", "stopped", "by itself", "by others", "unused"]
"""
armed       SGLang records from the next forward pass
stopped     our stop ended the recording
by itself   SGLang had reached the count before
by others   somebody else had stopped it before
unused      no forward pass came: nothing was recorded, and nothing is missing

A recording leaves `armed` once, for one of the others.
"""


@dataclass(kw_only=True)
class Recording:
    """State of one recording. Only its session changes it; code that publishes files reads it."""

    capture: EngineCapture
    label: str | None
    """Text that tells this engine's files from those of other engines of the replica; None if there is only
    one engine."""
    remote: bool
    """True if the engine is not a child of this process."""
    facts: EngineFacts
    plan: Plan
    folder: CaptureFolder
    ignored: dict[str, str]
    """{option or part that is absent: reason}"""
    passes_before: tuple[int, ...]
    """Number of forward passes that each scheduler had begun before the start; empty if unknown."""
    state: State = "armed"
    expired: str | None = None
    """Reason why stepscope stopped the engine before the end of the capture, or None."""
    failure: str | None = None
    """Reason why the engine may still be writing, or will never write again; None if it stopped normally."""
    opened: ClockAnchor | None = None
    closed: ClockAnchor | None = None
    states: Sequence[object] = ()
    """States of the schedulers after the end."""
    published: list[TraceName] = field(default_factory=list)
    """Names of the files that were published so far."""

    @property
    def is_bounded(self) -> bool:
        """Return whether SGLang stops by itself after a number of iterations."""
        return self.plan.count is not None

    @property
    def is_idle(self) -> bool:
        """Return whether the engine ran no forward pass, so that no file is missing."""
        if self.state != "unused" or self.failure is not None:
            return False
        return self.plan.start == 0 or counts_in(self.states) == self.passes_before

    def files(self) -> list[File]:
        """Return the recording's files; after a failure, only the complete ones."""
        files = self.folder.files()
        return files if self.failure is None else [file for file in files if self.folder.is_complete(file)]

    def stamps(self) -> list[Stamp]:
        """Return the times at which the schedulers' profilers started and wrote."""
        return stamps_in(self.states, str(self.folder.path))
