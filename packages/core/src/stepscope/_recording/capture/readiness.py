"""Checks of every process and engine of a run before its first step, with one start of each profiler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from stepscope._recording.capture import configure, omissions
from stepscope._recording.fanout.engines import check_capture, warn_of_long_stops
from stepscope._recording.fanout.messages import PrepareAnswer, PrepareRequest, WorkerOutcome
from stepscope._recording.fanout.participants import Participants
from stepscope._recording.fanout.worker_side import prepare_worker
from stepscope._recording.process import failures, identity, private_loop
from stepscope._recording.process.failures import describe
from stepscope._recording.spans import wrapping
from stepscope.config import ProfileConfig
from stepscope.engines import EngineProfiler
from stepscope.engines.own_thread import own_thread
from stepscope.errors import CaptureError, ours

STARTING_S = 300.0
"""Longest wait of `prepare` for a worker or an engine, which may still be loading its model."""
PATIENCE_S = 5.0
"""Longest time that an unedited program waits, once, for its workers. A worker that does not answer in time,
because it is busy or still starting, prepares later, at the latest in its first captured step."""
_FACTS = {"activities", "artifacts", "version"}
"""Keys of notes that an engine reports for each capture, whatever the user has set. For example, the default
activities include devices that the engine may lack."""


async def make_ready(
    config: ProfileConfig,
    workers: object,
    engines: object,
    role: str,
    *,
    edited: bool = True,
    own_answer: PrepareAnswer | None = None,
) -> None:
    """Check and warm up this process, its workers and its engines.

    Args:
        edited: True if the program calls `prepare` itself, so that its roles are known and its workers are
            not busy. False for an unedited program, which waits at most `PATIENCE_S` and continues without
            missing answers.
        own_answer: The answer of this process, or None if this process is not prepared yet.

    Raises:
        ConfigError: as a capture on opening.
        EngineError: as a capture on opening.
        CaptureError: a process or an engine cannot record. The message lists all problems.
    """
    participants = Participants(workers, engines)
    configure.check(config, on_ray=participants.fleet is not None)
    if participants.profilers:
        warn_of_long_stops(config)
    patience_s = config.budget.fanout_seconds
    deadline_s = max(patience_s, STARTING_S) if edited else min(patience_s, PATIENCE_S)
    request = PrepareRequest(config=config, run_id=identity.run_id())
    own, outcomes, engine_problems = await asyncio.gather(
        _this_process(msgspec.structs.replace(request, role=role), own_answer),
        _workers(participants, request, deadline_s),
        asyncio.gather(*(_engine(engine, config, deadline_s) for engine in participants.profilers)),
    )
    problems = [] if own.problem is None else [own.problem]
    problems += [
        f"{outcome.name}: {outcome.reason}"
        for outcome in outcomes
        if outcome.state != "ok" and (edited or not outcome.late)
    ]
    problems += [line for line, late in engine_problems if line is not None and (edited or not late)]
    if problems:
        listed = "\n  ".join(problems)
        raise CaptureError(f"profiling cannot work in {len(problems)} place(s):\n  {listed}")
    for warning in dict.fromkeys(
        (*own.warnings, *(line for outcome in outcomes for line in outcome.warnings))
    ):
        failures.warn_once(warning)
    if edited and (outcomes or participants.profilers or identity.is_alone()):
        # Roles that occur only in `span(role=)` are not known yet. The capture reports unmatched roles again.
        roles = {
            *own.roles,
            *(name for outcome in outcomes for name in outcome.roles),
            *wrapping.declared_roles,
        }
        roles |= {"rollout"} if participants.profilers else set()
        for pattern, reason in omissions.unmatched_roles(config.roles, roles, "known before the run").items():
            failures.warn_once(reason, about=f"roles.{pattern}")


async def _this_process(request: PrepareRequest, own_answer: PrepareAnswer | None) -> PrepareAnswer:
    return await own_thread(prepare_worker, request) if own_answer is None else own_answer


async def _workers(
    participants: Participants, request: PrepareRequest, deadline_s: float
) -> Sequence[WorkerOutcome]:
    return [] if participants.fleet is None else await participants.fleet.prepare(request, deadline_s)


async def _engine(
    engine: EngineProfiler, config: ProfileConfig, deadline_s: float
) -> tuple[str | None, bool]:
    """Check an engine. Return (reason why its profiler cannot work, or None; True if it did not answer in
    time).

    Options that have no effect on the engine are logged as warnings.
    """

    def check() -> Mapping[str, str]:
        engine.check()
        return check_capture(config, engine, identity.run_id())

    try:
        ignored = await private_loop.within(own_thread(check), deadline_s)
    except asyncio.TimeoutError:
        return f"replica {engine.replica}: no answer within {deadline_s:g} s", True
    except ours() as error:
        return f"replica {engine.replica}: {describe(error)}", False
    for option, reason in ignored.items():
        if option not in _FACTS:
            failures.warn_once(f"replica {engine.replica}: {option} has no effect: {reason}")
    return None, False
