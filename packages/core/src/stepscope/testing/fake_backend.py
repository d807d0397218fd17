"""A profiler in memory. It records the markers of its window, and fails on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from stepscope.backends import PendingArtifact, SpanInfo, Window
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError


class FakeBackend:
    """A backend that passes `BackendConformance`.

    Its traces are JSON: {"step": 2, "stage": null, "events": [...]}.
    """

    name = "fake"

    def __init__(self, config: ProfileConfig | None = None) -> None:
        self.fails_to_start = False
        """True to make the next start raise after it has locked the process."""
        self.lacks: str | None = None
        """The value of `PendingArtifact.lacking` in its recordings."""
        self._window: Window | None = None
        self._events: list[str] = []

    def check(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        self._window, self._events = window, []  # first: if an interrupt follows, stop() undoes it
        try:
            PROCESS_LOCK.acquire(f"the fake trace of step {window.step}", by=self)
            if self.fails_to_start:
                raise BackendError("the fake profiler cannot start")
        except Exception:
            self._end()
            raise

    def advance(self) -> None:
        if self._window is not None:
            self._events.append("mini-batch")

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        return nullcontext() if self._window is None or span.is_async else self._mark(span, self._events)

    @contextmanager
    def _mark(self, span: SpanInfo, events: list[str]) -> Iterator[None]:
        events.append(f"{span.role}.{span.stage}")
        yield

    def stop(self) -> list[PendingArtifact]:
        window = self._window
        if window is None:
            return []
        in_child = PROCESS_LOCK.holder is None  # a fork
        self._end()
        if in_child:
            return []
        trace = {"step": window.step, "stage": window.stage, "events": self._events}

        def write(path: Path) -> None:
            path.write_text(json.dumps(trace))

        artifact = PendingArtifact(
            kind="fake_trace", suffix=".json", write=write, compress=True, lacking=self.lacks
        )
        return [artifact]

    def _end(self) -> None:
        PROCESS_LOCK.release(by=self)
        self._window = None  # last: after an earlier interrupt, stop() repeats everything
