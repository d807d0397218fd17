"""prepare(): before the first step, what can be wrong is found and every one-off cost is paid.

Without it the first captured step does both: its body is not slower for it, but the run waits some seconds
before it (torch.profiler's first start in a process takes 1.2 to 2.5 s, more on a busy machine).
"""

from __future__ import annotations

from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError, StepscopeError
from stepscope.recording import guard, run, signalled
from stepscope.recording.windows import in_event_loop


def prepare(
    *,
    workers: object = None,
    engines: object = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
) -> None:
    """Checks this process, its workers and its engines, and starts each one's profiler once for nothing.

    Call it once, after the workers are placed. It takes what `capture` takes. When the configuration selects
    no steps it makes ready for requests, and what is wrong is a warning and not raised; with
    `control.requests` false too it does nothing.

    Raises:
        ConfigError: as `capture` on opening.
        EngineError: as `capture` on opening.
        CaptureError: one line for each process or engine whose profiler cannot work, with the reason; or this
            runs inside an event loop (await `aprepare` there).
    """
    if in_event_loop():
        raise CaptureError("prepare() would block the running event loop. Fix: await aprepare(...)")
    from stepscope.recording import loop

    config = run.current() if config is None else config
    signalled.handle(config)  # on this thread: the rest runs on the loop's
    loop.run(aprepare(workers=workers, engines=engines, config=config, role=role))


async def aprepare(
    *,
    workers: object = None,
    engines: object = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
) -> None:
    """As `prepare`, without blocking the event loop."""
    config = run.current() if config is None else config
    signalled.handle(config)
    if not config.steps and not config.control.requests:
        return
    from stepscope.recording.readiness import make_ready

    if config.steps:
        await make_ready(config, workers, engines, role)
        return
    try:
        await make_ready(config.replace(steps=[0]), workers, engines, role)  # as a request would select it
    except StepscopeError as error:
        guard.warn(
            "stepscope: `steps` selects nothing, and a capture on request would not be whole: %s", error
        )
