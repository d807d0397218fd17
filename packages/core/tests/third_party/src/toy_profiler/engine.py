"""The adapter `toy`: an engine that names its passes `toy pass: <prefills> + <decodes>`."""

from __future__ import annotations

import asyncio
import json
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from stepscope.engines import (
    EngineCapture,
    EngineFactory,
    EngineProfilerBase,
    Iterations,
    refuse_second_start,
)
from stepscope.engines.artifacts import publish
from stepscope.files.sidecar import Artifact

OPTIONS = ("with_stack", "record_shapes", "profile_memory", "by_stage", "merge")


class ToyEngine:
    """Generates one token for each request in each pass."""

    built: ClassVar[weakref.WeakSet[ToyEngine]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.passes: list[dict[str, object]] = []
        self.built.add(self)

    def generate(self, requests: int, tokens: int) -> None:
        for number in range(tokens):
            prefills, decodes = (requests, 0) if number == 0 else (0, requests)
            name = f"toy pass: {prefills} + {decodes}"
            event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": os.getpid(), "tid": 1}
            self.passes.append({**event, "ts": time.time_ns() / 1000, "dur": 0.01})


class ToyProfiler(EngineProfilerBase):
    def __init__(self, engine: ToyEngine, replica: int) -> None:
        super().__init__(replica)
        self.engine = engine
        self._capture: EngineCapture | None = None

    @property
    def world_size(self) -> int:
        return 1

    def check(self) -> None:
        """Nothing to check: the engine runs in this process."""

    async def start(self, capture: EngineCapture) -> None:
        refuse_second_start(self._capture)
        self._capture = capture
        requested = {name: getattr(capture, name) for name in OPTIONS}
        self._ignored = {name: "passes are all it records" for name, value in requested.items() if value}
        if capture.iterations != Iterations():
            self._ignored["iterations"] = "it records all passes"
        self._ignored.update(dict.fromkeys(capture.extra, "it has no such option"))
        self.engine.passes.clear()

    async def stop(self) -> list[Artifact]:
        capture, self._capture = self._capture, None
        return [] if capture is None else [await asyncio.to_thread(self._write, capture)]

    def _write(self, capture: EngineCapture) -> Artifact:
        path = Path(capture.out_dir) / f"{capture.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": self.engine.passes}
        path.write_text(json.dumps(trace))
        return publish(
            path, capture, kind="torch_trace", tool="toy", rank=capture.replica, world_size=1, pid=os.getpid()
        )


class ToyFactory(EngineFactory):
    distributions = ("msgspec",)

    def recognises(self, engine: object) -> bool:
        return isinstance(engine, ToyEngine)

    def owned(self) -> Sequence[object]:
        return tuple(ToyEngine.built)

    def __call__(self, engine: object, replica: int) -> ToyProfiler:
        assert isinstance(engine, ToyEngine)
        return ToyProfiler(engine, replica)


factory = ToyFactory()
