"""Before the first step: every process and engine of a run is checked, and its profiler started for
nothing.
"""

from __future__ import annotations

import asyncio

from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler
from stepscope.errors import CaptureError
from stepscope.recording import run, untold
from stepscope.recording.loop import within
from stepscope.recording.others import Others
from stepscope.recording.spans import describe
from stepscope.recording.worker import PrepareRequest, prepare_worker

STARTING_S = 300.0
"""How long a worker may take to answer before the run: it may still be loading its model."""


async def make_ready(config: ProfileConfig, workers: object, engines: object, role: str) -> None:
    """Raises ConfigError or EngineError as a capture would on opening; CaptureError with all that is
    wrong.
    """
    others = Others(None if untold.none_meant(workers) else workers, engines)
    if workers is not None and not untold.none_meant(workers):
        untold.workers_prepared()
    run.check(config, on_ray=others.fleet is not None)
    found = await asyncio.gather(
        asyncio.to_thread(prepare_worker, PrepareRequest(config=config, role=role)),
        _workers(others, config),
        *(_engine(engine, config) for engine in others.profilers),
    )
    problems = [problem for problems in found for problem in problems]
    if problems:
        listed = "\n  ".join(problems)
        raise CaptureError(f"profiling cannot work in {len(problems)} place(s):\n  {listed}")


async def _workers(others: Others, config: ProfileConfig) -> list[str]:
    if others.fleet is None:
        return []
    deadline_s = max(config.budget.fanout_seconds, STARTING_S)
    outcomes = await others.fleet.prepare(PrepareRequest(config=config), deadline_s)
    return [f"{each.name}: {each.reason}" for each in outcomes if each.state != "ok"]


async def _engine(engine: EngineProfiler, config: ProfileConfig) -> list[str]:
    try:
        await within(asyncio.to_thread(engine.check), config.budget.fanout_seconds)
    except asyncio.TimeoutError:
        return [f"replica {engine.replica}: no answer within {config.budget.fanout_seconds:g} s"]
    except Exception as error:
        return [f"replica {engine.replica}: {describe(error)}"]
    return []
