"""`prepare`: checks and one-time costs before the first step.

Without `prepare`, the first capture pays these costs while it opens. The opening then takes some seconds, and
the step itself is not slower. The first start of torch.profiler in a process takes 1.2 to 2.5 s, more on a
busy machine.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope._recording.capture import configure, omissions
from stepscope._recording.capture.asked import check_asked
from stepscope._recording.fanout.messages import PrepareRequest
from stepscope._recording.fanout.worker_side import prepare_worker
from stepscope._recording.process import failures, identity, shutdown
from stepscope._recording.process.identity import in_event_loop
from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError, StepscopeError, ours
from stepscope.files import switch

if TYPE_CHECKING:
    from stepscope._recording.fanout.messages import PrepareAnswer
    from stepscope._recording.fanout.participants import Engines, Workers


def prepare(
    *,
    workers: Workers | None = None,
    engines: Engines | None = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
) -> None:
    """Check this process, its workers and its engines, and start each profiler once to pay its one-time
    costs.

    Call this once, after the workers are created. If the configuration selects no steps, problems are only
    logged, because steps may still be requested. If requests are off too (`control.requests`), nothing is
    done.

    Args:
        workers: As for `capture`, like the other arguments.

    Raises:
        ConfigError: as `capture` on opening.
        EngineError: as `capture` on opening.
        CaptureError: a profiler cannot work; the message has a line for each process or engine. Also raised
            in a running event loop, where `aprepare` must be awaited instead.
    """
    if switch.DISABLED:
        return
    check_asked("prepare", role, config, workers)
    if in_event_loop():
        raise CaptureError("prepare() would block the running event loop. Fix: await aprepare(...)")
    config = _configured(config)
    own_answer = None
    if _may_capture(config):
        # On this thread, because torch prints an error if its profiler first starts on another thread than
        # the one that imported torch.
        own_answer = prepare_worker(PrepareRequest(config=config, run_id=identity.run_id(), role=role))
    _wait_for(_prepare(config, workers, engines, role, own_answer))


async def aprepare(
    *,
    workers: Workers | None = None,
    engines: Engines | None = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
) -> None:
    """Prepare as `prepare` does, without blocking the event loop.

    Raises:
        ConfigError, EngineError, CaptureError: as `prepare`.
    """
    if switch.DISABLED:
        return
    check_asked("aprepare", role, config, workers)
    await _prepare(_configured(config), workers, engines, role, None)


def _configured(config: ProfileConfig | None) -> ProfileConfig:
    config = configure.current() if config is None else configure.placed(config)
    shutdown.handle(config)  # signals need this thread; later work runs on the private loop
    return config


def _may_capture(config: ProfileConfig) -> bool:
    return bool(config.steps) or config.control.requests


async def _prepare(
    config: ProfileConfig,
    workers: object,
    engines: object,
    role: str,
    own_answer: PrepareAnswer | None,
) -> None:
    """
    Args:
        own_answer: The answer of this process, or None if this process is not prepared yet.
    """
    identity.mark_prepared()
    workers = None if omissions.none_meant(workers) else workers
    if workers is not None:
        omissions.workers_prepared()
    if not _may_capture(config):
        return
    try:
        await _readiness().make_ready(config, workers, engines, role, own_answer=own_answer)
    except StepscopeError as error:
        if config.steps:
            raise
        failures.warn(
            "stepscope: `steps` selects nothing, and a capture on request would not be whole: %s", error
        )


def before_first_step(config: ProfileConfig, workers: object, engines: object, role: str) -> None:
    """Prepare an unedited program once, because its code does not call `prepare`.

    Problems are logged. If no steps are selected, nothing is done, because a step may never be requested.
    """
    if not is_due(config):
        return
    with _logged():
        if workers is not None or engines is not None:
            _wait_for(_readiness().make_ready(config, workers, engines, role, edited=False))
            return
        configure.check(config, on_ray=False)
        # On the thread to record, because torch logs an error on another thread.
        problem = prepare_worker(PrepareRequest(config=config, run_id=identity.run_id(), role=role)).problem
        if problem is not None:
            raise CaptureError(f"profiling cannot work in this process: {problem}")


def _wait_for(work: Coroutine[Any, Any, None]) -> None:
    _readiness().private_loop.run(work)


async def abefore_first_step(config: ProfileConfig, workers: object, engines: object, role: str) -> None:
    """Prepare as `before_first_step` does, without blocking the event loop."""
    if not is_due(config):
        return
    with _logged():
        await _readiness().make_ready(config, workers, engines, role, edited=False)


def _readiness() -> ModuleType:
    from stepscope._recording.capture import readiness  # imported here, because the module imports asyncio

    return readiness


@contextmanager
def _logged() -> Iterator[None]:
    identity.mark_prepared()
    try:
        yield
    except StepscopeError as error:
        failures.warn("stepscope: %s", error)
    except ours() as error:
        failures.note("preparing before the first step", error)


def is_due(config: ProfileConfig) -> bool:
    """Return whether an unedited program with selected steps has not been prepared yet."""
    return bool(config.steps) and not identity.is_prepared()
