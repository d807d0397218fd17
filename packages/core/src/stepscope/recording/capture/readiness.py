"""Checks before the first step: every process and engine of a run, with one start of its profiler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler
from stepscope.engines.own_thread import own_thread
from stepscope.errors import CaptureError
from stepscope.recording.capture import configure, omissions
from stepscope.recording.fanout.engines import warn_of_long_stops
from stepscope.recording.fanout.fleet import WorkerOutcome
from stepscope.recording.fanout.messages import PrepareAnswer, PrepareRequest
from stepscope.recording.fanout.participants import Participants
from stepscope.recording.fanout.worker_side import prepare_worker
from stepscope.recording.process import failures, identity, private_loop, run
from stepscope.recording.process.failures import describe
from stepscope.recording.spans import wrapping

STARTING_S = 300.0
"""Longest wait for the answer of a worker or an engine before the run: it may still be loading its model."""


async def make_ready(
    config: ProfileConfig,
    workers: object,
    engines: object,
    role: str,
    *,
    edited: bool = True,
    alone: PrepareAnswer | None = None,
) -> None:
    """Check and warm up this process, its workers and its engines.

    Args:
        edited: The program calls `prepare` itself: it declares its roles, and nothing is at work yet. In one
            that nobody edits, roles come with the modules that it imports. A busy worker gets no more time
            than in a capture.
        alone: The outcome of preparing this process; None if it is not prepared yet.

    Raises:
        ConfigError: as a capture on opening.
        EngineError: as a capture on opening.
        CaptureError: all that is wrong.
    """
    participants = Participants(None if omissions.none_meant(workers) else workers, engines)
    configure.check(config, on_ray=participants.fleet is not None)
    if participants.profilers:
        warn_of_long_stops(config)
    own, outcomes, engines_problems = await asyncio.gather(
        _this_process(config, role, alone),
        _workers(participants, config, STARTING_S if edited else 0.0),
        asyncio.gather(
            *(_engine(engine, config, STARTING_S if edited else 0.0) for engine in participants.profilers)
        ),
    )
    problems = [] if own.problem is None else [own.problem]
    problems += [f"{outcome.name}: {outcome.reason}" for outcome in outcomes if outcome.state != "ok"]
    problems += [problem for of_engine in engines_problems for problem in of_engine]
    if problems:
        listed = "\n  ".join(problems)
        raise CaptureError(f"profiling cannot work in {len(problems)} place(s):\n  {listed}")
    for warning in dict.fromkeys(
        (*own.warnings, *(line for outcome in outcomes for line in outcome.warnings))
    ):
        failures.warn_once(warning)
    if edited and (outcomes or participants.profilers or identity.is_alone()):
        roles = {*own.roles, *(name for outcome in outcomes for name in outcome.roles)}
        _say_unmatched_roles(config, roles | {"rollout"} if participants.profilers else roles)


def _say_unmatched_roles(config: ProfileConfig, roles: set[str]) -> None:
    """Roles that only `span(role=)` names are not known yet: a capture warns again once it has seen them."""
    roles |= wrapping.declared_roles
    for reason in omissions.unmatched_roles(config.roles, roles, "known before the run").values():
        failures.warn_once(reason)


async def _this_process(config: ProfileConfig, role: str, alone: PrepareAnswer | None) -> PrepareAnswer:
    if alone is not None:
        return alone
    request = PrepareRequest(config=config, run_id=run.run_id(), role=role)
    return await own_thread(prepare_worker, request)


async def _workers(
    participants: Participants, config: ProfileConfig, starting_s: float
) -> Sequence[WorkerOutcome]:
    if participants.fleet is None:
        return []
    deadline_s = max(config.budget.fanout_seconds, starting_s)
    return await participants.fleet.prepare(PrepareRequest(config=config, run_id=run.run_id()), deadline_s)


async def _engine(engine: EngineProfiler, config: ProfileConfig, starting_s: float) -> list[str]:
    deadline_s = max(config.budget.fanout_seconds, starting_s)
    try:
        await private_loop.within(own_thread(engine.check), deadline_s)
    except asyncio.TimeoutError:
        return [f"replica {engine.replica}: no answer within {deadline_s:g} s"]
    except Exception as error:
        return [f"replica {engine.replica}: {describe(error)}"]
    return []
