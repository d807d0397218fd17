"""The backend `toy`: writes the markers of each span, one in a line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stepscope.backends import PendingArtifact, SpanInfo, Window
from stepscope.config import ProfileConfig


class ToyBackend:
    name = "toy"

    def __init__(self, config: ProfileConfig) -> None:
        self._lines: list[str] | None = None

    def check(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        self._lines = []

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        return self._marked(span.stage)

    @contextmanager
    def _marked(self, stage: str) -> Iterator[None]:
        start_ns = time.time_ns()
        yield
        if self._lines is not None:
            self._lines.append(f"{stage} {start_ns} {time.time_ns()}\n")

    def stop(self) -> list[PendingArtifact]:
        if self._lines is None:
            return []
        text, self._lines = "".join(self._lines), None

        def write(path: Path) -> None:
            path.write_text(text)

        return [PendingArtifact(kind="toy_trace", suffix=".toy", write=write, compress=False)]
