"""Interface of an engine to its captures: its facts, and the start and stop of its profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option
from stepscope.files.passes import PassFile
from stepscope_vllm._files.ranks import Layout

PASSES_NEEDED = (
    "Fix: install stepscope-rollout-vllm in the environment of the engine's processes (with `stepscope` in "
    "VLLM_PLUGINS, if that is set; servers need vLLM 0.32), or set engine.passes: 0"
)
"""Fix for an engine that notes no passes."""


class Started(NamedTuple):
    """Facts about a recording that has begun."""

    folder: Path
    """Folder in which its files appear."""
    named: bool
    """True if the names of the files begin with the capture's name."""
    aimed: bool
    """True if the files are written to the capture's folder (`extension.aim`)."""
    by_others: bool = False
    """True if another tool (nsys) writes the recording, not vLLM."""


class Target(Protocol):
    """An engine that can be recorded: one in this process, or one behind HTTP."""

    @property
    def version(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """Folder that the engine writes to, or None if unknown."""
        ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the engine was built with; empty if unknown."""
        ...

    @property
    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Reports of the engine's workers after the latest stop (`WorkerExtension.stepscope_release`)."""
        ...

    def take_passes(self) -> Sequence[PassFile]:
        """Return the notes of the engine's passes in the latest recording, and remove them. May block."""
        ...

    def facts(self) -> dict[str, Option]:
        """Return the engine's layout and metrics. May block."""
        ...

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started: ...

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        ...
