"""Engines as their captures see them: facts to ask for, and a profiler to start and stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option
from stepscope_vllm._files.ranks import Layout


class Started(NamedTuple):
    """Facts about a recording that has begun."""

    folder: Path
    """Folder in which its files appear."""
    named: bool
    """Their names begin with the capture's."""
    aimed: bool
    """They are written to the capture's folder (`extension.aim`)."""
    by_others: bool = False
    """A tool above the engine (nsys) writes the recording, not vLLM."""


class Target(Protocol):
    """Recorded engine: one of this process, or one behind HTTP."""

    @property
    def version(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """Folder that the engine writes to; None if unknown."""
        ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the engine was built with; empty where they are not known."""
        ...

    @property
    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Reports of its workers after the latest stop (`WorkerExtension.stepscope_release`)."""
        ...

    def facts(self) -> dict[str, Option]:
        """Return its layout and its metrics. May block."""
        ...

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started: ...

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        ...
