"""State of one recording of an engine, from its start to the last of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option
from stepscope.files.clock import ClockAnchor
from stepscope_vllm._driving.target import Started, Target
from stepscope_vllm._files import names, ranks
from stepscope_vllm._files.ranks import Layout


@dataclass(kw_only=True)
class Recording:
    """State of one recording. Only its session changes it; code that publishes files reads it."""

    target: Target
    capture: EngineCapture
    ignored: dict[str, str]
    """{option or part that is absent: reason}"""
    started: Started | None = None
    """Facts about the start, or None before the recording has begun."""
    files_before: set[str] = field(default_factory=set)
    """Names in the engine's folder before the start."""
    files_at_start: set[str] = field(default_factory=set)
    """Names in the engine's folder after the start."""
    opened: ClockAnchor | None = None
    closed: ClockAnchor | None = None
    facts_at_start: Mapping[str, Option] = field(default_factory=dict)
    facts_at_stop: Mapping[str, Option] = field(default_factory=dict)
    expired: str | None = None
    """Reason why stepscope stopped the engine before the end of the capture, or None."""
    stop_ns: int | None = None
    """Time at which stepscope stopped the engine, in unix ns, or None."""
    is_early: bool = False
    """True if a trace existed before stepscope stopped the engine."""
    changed_ns: Mapping[str, int] = field(default_factory=dict)
    """Times at which its files were complete in the engine's folder (`engine_folder.changed_ns`)."""

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of its files."""
        return names.prefix_of(self.capture.name)

    @property
    def local_ranks(self) -> list[int] | None:
        """Return the wanted ranks in the engine's own numbering, or None for all."""
        return ranks.local_ranks(self.capture.ranks, self.target.layout, self.capture.replica)

    @property
    def iterations_asked(self) -> int | None:
        """Return the number of engine iterations to record, or None for all until the end of the capture."""
        return None if "iterations" in self.ignored else self.capture.iterations.count

    def is_named(self, name: str) -> bool:
        """Return whether a file has the prefix of this recording."""
        return name.startswith(f"{self.prefix}_")

    def workers_expected(self, layout: Layout) -> int:
        """Return the number of workers that write files. With stepscope's extension, workers of unwanted
        ranks do not.
        """
        local = self.local_ranks
        if self.started is None or not self.started.aimed or local is None:
            return layout.size
        return len(local) * layout.dp
