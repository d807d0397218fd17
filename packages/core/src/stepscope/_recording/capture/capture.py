"""`capture` and `Capture`: the recording of one step in this process, its workers and its engines.

A step that is not selected is passed to the flight recorder.
"""

from __future__ import annotations

import time
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING

from stepscope._recording.capture import configure, omissions
from stepscope._recording.capture.asked import Asked, Closing, check_asked, rank_of, step_of
from stepscope._recording.capture.on_demand import wanted
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.instrument import no_step
from stepscope._recording.process import identity, shutdown
from stepscope._recording.process.failures import describe
from stepscope._recording.process.identity import identify, in_event_loop
from stepscope._recording.recorder import steps
from stepscope._recording.session import activation, oom
from stepscope._recording.spans.scopes import Mark
from stepscope.config import ProfileConfig
from stepscope.errors import CaptureError
from stepscope.files import switch
from stepscope.files.manifest import Ending, OpenedBy

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from stepscope._recording.capture.lifecycle import Lifecycle
    from stepscope._recording.fanout.participants import Engines, Workers


def opened() -> Capture | None:
    """Return the capture of this process that is opening, open or closing, or None."""
    holder = activation.holder()
    return holder if isinstance(holder, Capture) else None


def capture(
    step: int,
    *,
    workers: Workers | None = None,
    engines: Engines | None = None,
    config: ProfileConfig | None = None,
    role: str = "trainer",
    rank: int | None = None,
) -> Capture:
    """Record one step, if the configuration selects it.

    Use the result with `with` or `async with`, or call `open` and `close`:

        with stepscope.capture(step, workers={"actor": actors}, engines=[llm]) as cap:
            train(step)
        cap.result.path  # the step's folder, or None if the step is not selected

    Args:
        step: Global number of the step, 0 or more; also an integer of numpy or torch.
        workers: Ray actors to record too: a handle, a sequence of handles in rank order, or {role: handles}.
            Their classes need no change. An empty sequence means that there are no workers.
        engines: Inference engines to record too, in the order of replicas 0, 1, 2...: `EngineProfiler`s, or
            engine objects that an installed adapter recognises. The name of an adapter, such as "vllm", means
            its engines in this process.
        config: Configuration in place of the one from `configure` or the environment.
        role: Role of this process.
        rank: Rank of this process. By default from STEPSCOPE_RANK, torch.distributed, or RANK.

    Raises:
        ConfigError: an argument or the configuration is wrong. Workers and engines are checked at the first
            call, even if its step is not selected. Errors of workers and engines in later calls are only
            logged, and the run continues.
        EngineError: no installed adapter recognises an engine. Checked at the first call too.
        CaptureOpenError: raised on opening, if another capture is open in this process.
        CaptureError: raised on opening a capture with workers or engines in a running event loop without
            `async`.

    With STEPSCOPE_DISABLE=1, nothing is raised and nothing is recorded.
    """
    return Capture(step, workers, engines, config, role, rank, "program")


class Capture:
    """The recording of one step. `capture` returns it, and `result` has its outcome."""

    def __init__(
        self,
        step: int,
        workers: object,
        engines: object,
        config: ProfileConfig | None,
        role: str,
        rank: int | None,
        opened_by: OpenedBy,
    ) -> None:
        began_ns = time.monotonic_ns()
        if switch.DISABLED:
            workers, engines, config = None, None, ProfileConfig()
        else:
            check_asked("capture", role, config, workers)
            step, rank = step_of(step), rank_of(rank)
        config = configure.current() if config is None else configure.placed(config)
        self.step = step
        if config.cuda_memory.oom_any_step != "off":
            oom.watch(config, identify(role, rank=rank), identity.run_id(), step)
        names_workers = workers is not None
        if workers is not None and omissions.none_meant(workers):
            workers = None
        self._is_first = opened_by == "program" and _check_first(config, workers, engines)
        requested = wanted(config, step, role, rank, alone=workers is not None or engines is not None)
        self.config = config if requested is None else requested
        self.selected = self.config.selects(step)
        if config.instrument:
            no_step.reached(config, step)
        on_request = requested is not None
        self._asked = Asked(
            step, self.config, workers, engines, role, rank, names_workers, on_request, opened_by
        )
        self._mark: Mark | None = None
        """Mark of the scope in which the capture was opened, or None if the capture is not open."""
        self._began: steps.Began | None = None
        """Start of a step that is not selected, or None if no such step is running."""
        self._end_kept: Callable[[object], None] | None = None
        """Function that ends an unselected step in the flight recorder, or None."""
        self._life: Lifecycle | None = None
        """The lifecycle of the capture. None if the step is not selected."""
        if self.selected:
            self._life = _lifecycle().Lifecycle(self._asked, taker=self)
        self._spent_ns = time.monotonic_ns() - began_ns
        """Duration of the constructor in ns, which counts as a cost of the capture."""

    @property
    def result(self) -> CaptureResult:
        """The result. It has the step's files once the capture is open; before that, `captured` is False."""
        result = None if self._life is None else self._life.result
        return CaptureResult(self.step) if result is None else result

    @property
    def state(self) -> str:
        """One of new, opening, open, closing and closed. The capture of a step that is not selected is always
        new.
        """
        return "new" if self._life is None else self._life.state

    def open(self) -> Self:
        """Open the capture. If the step is not selected, nothing is recorded.

        Raises:
            CaptureOpenError: another capture is open in this process.
            CaptureError: the call would block a running event loop, or this capture was opened before.
        """
        self._mark = Mark()
        if self._life is None:
            if self._is_first:
                self._refuse_to_block_a_loop()
            self._begin_unselected()
            return self
        began_ns = time.monotonic_ns() - self._spent_ns
        self._refuse_to_block_a_loop()
        self._stand()
        self._life.open(began_ns)
        return self

    async def aopen(self) -> Self:
        """Open the capture as `open` does, without blocking the event loop.

        A cancellation is raised after the opening is undone.
        """
        self._mark = Mark()
        if self._life is None:
            self._begin_unselected()
        else:
            began_ns = time.monotonic_ns() - self._spent_ns
            self._stand()
            await self._life.aopen(began_ns)
        return self

    def close(self, error: str | None = None, deadline_s: float | None = None) -> None:
        """Close the capture. A second call does nothing, also while a task is closing the capture. Internal
        errors are recorded in the manifest and not raised.

        Args:
            error: Reason of an early end, or None if the step ended normally.
            deadline_s: Time limit for each worker and engine. `budget.fanout_seconds` by default.
        """
        self._leave_scopes()
        if self._life is None:
            self._end_unselected(error)
        elif not self._life.is_left_to_a_task():
            self._life.close(Closing(_ending_of(error), deadline_s))

    async def aclose(self, error: str | None = None) -> None:
        """Close the capture as `close` does, without blocking the event loop.

        A cancellation does not interrupt the closing, and is raised afterwards.
        """
        await self._aclose(error)

    async def _aclose(self, error: BaseException | str | None) -> None:
        if self._life is None:
            self._leave_scopes()
            self._end_unselected(error)
            return
        self._life.leave()  # first, because `leave` reads the clock
        self._leave_scopes()
        cancelled = await self._life.aclose(Closing(_ending_of(error)))
        if cancelled is not None and not isinstance(error, type(cancelled)):
            raise cancelled

    def end_with_process(self, ending: Ending, deadline_s: float) -> None:
        """See `activation.Taker`."""
        if self._life is not None:
            self._life.close(Closing(ending, deadline_s), timeout_s=deadline_s + shutdown.GRACE_S)

    def disown(self) -> None:
        """See `activation.Taker`. A forked child may leave the `with` block too, for example by `exit()`, and
        must not close the parent's capture.
        """
        if self._life is not None:
            self._life.disown()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life is None:
            self._leave_scopes()
            self._end_unselected(error)
            return
        self._life.leave()  # first, because `leave` reads the clock
        self._leave_scopes()
        self._life.close(Closing(_ending_of(error)))

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._aclose(error)

    def _leave_scopes(self) -> None:
        """Leave scopes of the step that are still entered. An exception of a signal handler may have
        interrupted their exit.
        """
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.leave_inner()

    def _stand(self) -> None:
        """Start the flight recorder, which also writes a line for each captured step."""
        if self.config.record != "off" and self.state == "new":
            _kept_steps().stand(self._asked)

    def _begin_unselected(self) -> None:
        """Begin a step that is not captured. Its duration is kept, and the flight recorder may keep its
        spans.
        """
        self._began = steps.begin()
        if self._began is not None and self.config.record != "off":
            self._end_kept = _kept_steps().begin(self._asked)

    def _end_unselected(self, error: object) -> None:
        """End a step that is not captured. A step that an exception ended is not compared with other
        steps.
        """
        began, self._began = self._began, None
        end_kept, self._end_kept = self._end_kept, None
        if began is not None and error is None:
            steps.end(began, step=self.step, save_path=self.config.save_path, role=self._asked.role)
        if end_kept is not None:
            end_kept(error)

    def _refuse_to_block_a_loop(self) -> None:
        if (self._asked.workers is None and self._asked.engines is None) or not in_event_loop():
            return
        raise CaptureError(
            "opening a capture with workers or engines would block the running event loop. "
            "Fix: `async with capture(step, ...)`, or `await` its aopen() and aclose()"
        )


def _lifecycle() -> ModuleType:
    from stepscope._recording.capture import lifecycle  # imported here, because the module imports asyncio

    return lifecycle


_checked: deque[tuple[ProfileConfig, bool, bool]] = deque(maxlen=8)
"""(configuration, has workers, has engines) of captures that were checked. One writer: `_check_first`."""


def _check_first(config: ProfileConfig, workers: object, engines: object) -> bool:
    """At the first capture of a configuration, even of a step that is not selected, check everything that can
    be wrong with captures. Return True if this call made the check.

    A run that selects no steps is checked at its first requested step, where wrong workers or engines are
    left out.

    Raises:
        ConfigError: as `capture`.
        EngineError: as `capture`.
    """
    asked = (config, workers is not None, engines is not None)
    if switch.DISABLED or not config.steps or asked in _checked:
        return False
    on_ray = False
    if workers is not None or engines is not None:
        on_ray = _lifecycle().Participants(workers, engines).fleet is not None
    configure.check(config, on_ray=on_ray)
    _checked.append(asked)
    return True


def _kept_steps() -> ModuleType:
    from stepscope._recording.capture import kept_steps  # imported here, because the module imports much

    return kept_steps


def _ending_of(error: BaseException | str | None) -> Ending | None:
    if error is None:
        return None
    return Ending("exception", error if isinstance(error, str) else describe(error))
