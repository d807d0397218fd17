"""One captured step of a program that has the toy package installed. Argument: the run's folder."""

from __future__ import annotations

import sys

from toy_profiler.engine import ToyEngine

import stepscope

stepscope.configure(
    save_path=sys.argv[1],
    steps=[1],
    tool="toy",
    roles={"rollout": {"ranks": "all", "profiler": False}, "*": {"ranks": "all"}},
)
engine = ToyEngine()
with stepscope.capture(step=1, engines="toy", workers={}) as capture:
    with stepscope.span("generate", role="trainer"):
        engine.generate(requests=3, tokens=4)
    with stepscope.span("learn", role="trainer"):
        pass
stepscope.flush()
capture.result.raise_for_missing()
