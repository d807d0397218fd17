"""A run for tests, which records spans into its own folder and reads them back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope._recording.capture import configure as run
from stepscope._recording.spans import log, span
from stepscope.config import ProfileConfig, Settings
from stepscope.errors import RecordError
from stepscope.files import clock
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Manifest
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.spans import Line, Span

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


START_NS = 1_000_000_000
WALL_NS = 1_750_000_000_000_000_000
"""Time of the wall clock, in unix ns, at START_NS."""


class FakeClock:
    """A clock that replaces the clock of spans and clock anchors in this process, within its `with` block.

    Budgets, deadlines and the costs in the manifest use the real clock, so that a test that hangs still ends.
    """

    CLOCK_MONOTONIC_RAW = 4  # as in the module `time`, which this object replaces

    def __init__(self) -> None:
        self.now_ns = START_NS

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`.

        Raises:
            ValueError: `seconds` is negative. The clock of spans never goes back.
        """
        if seconds < 0:
            raise ValueError(f"advance(seconds) is {seconds}; allowed: 0 or more")
        self.now_ns += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return WALL_NS + self.now_ns - START_NS

    def clock_gettime_ns(self, which: int) -> int:
        return self.now_ns

    def __enter__(self) -> Self:
        vars(log)["monotonic_ns"] = vars(span)["monotonic_ns"] = self.monotonic_ns
        vars(clock)["time"] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        vars(log)["monotonic_ns"] = vars(span)["monotonic_ns"] = time.monotonic_ns
        vars(clock)["time"] = time


def finished_spans(save_path: str | Path, step: int | None = None) -> list[Span]:
    """Return the finished spans of closed captures of `step`, or of all steps, ordered by start."""
    layout = RunLayout(save_path)
    steps = layout.steps() if step is None else [step]
    files = [file for number in steps for file in sorted(layout.step(number).spans.glob("*.jsonl"))]
    decoder = msgspec.json.Decoder(Line)
    lines = [line for file in files for line in decoder.decode_lines(file.read_bytes())]
    return sorted((line for line in lines if isinstance(line, Span)), key=lambda span: span.start_ns)


class RecordedRun:
    """The configured run of one test, and the files of its captures."""

    def __init__(self, folder: Path) -> None:
        spans_alone = {"*": {"profiler": "off"}}
        self.config = run.configure(save_path=str(folder), steps="every:1", record="off", roles=spans_alone)
        self.layout = RunLayout(folder)

    def configure(self, **settings: Unpack[Settings]) -> ProfileConfig:
        """Change fields of the configuration, which is the fixture's at first.

        Raises:
            ConfigError: as `stepscope.configure`.
        """
        self.config = run.configure(self.config.replace(**settings))
        return self.config

    def spans(self, step: int | None = None) -> list[Span]:
        """Return the finished spans of closed captures of `step`, or of all steps, ordered by start."""
        return finished_spans(self.layout.root, step)

    def stages(self, step: int | None = None) -> list[str]:
        """Return `role/stage` of each span in `spans`."""
        return [f"{span.role}/{span.stage}" for span in self.spans(step)]

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step from its files.

        Raises:
            RecordError: the step was not captured.
        """
        parts, _ = read_parts(self.layout.step(step))
        if not parts:
            captured = ", ".join(map(str, self.layout.steps())) or "none"
            raise RecordError(f"step {step} was not captured; captured: {captured}")
        return fold(parts)
