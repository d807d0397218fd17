"""What backends share whose windows belong to a thread: one at a time, stopped from anywhere, never leaked.

The profiler itself is in the window (`torch.window`); here is who may start it, how a stop reaches its
thread, and what is left when that thread does not answer.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

from stepscope.backends.protocol import Window
from stepscope.backends.threaded.window_thread import ANSWER_S, Task, WindowThread, run_on
from stepscope.errors import BackendError, ProfilerBusyError

BEGIN_S = 60
"""How long a start waits for its thread, which may be ending the window before."""


class ThreadWindow(Protocol):
    """One stretch of recording. `begin`, `advance` and `end` are called on its thread alone."""

    name: str
    thread: WindowThread

    def begin(self) -> None: ...
    def advance(self) -> None: ...
    def end(self) -> None: ...


WindowT = TypeVar("WindowT", bound=ThreadWindow)


class Late:
    """A window whose thread has not come to ending it yet."""

    def __init__(self, window: ThreadWindow, task: Task) -> None:
        self._window = window
        self._task = task
        self._caller = threading.current_thread().name
        self.truncated = f"stopped by thread {self._caller}, ended when {window.thread.name} came to it"

    def wait(self, patience_s: float, fix: str = "") -> None:
        """Until it has ended.

        Raises:
            BackendError: it has not; `fix` is what would help.
        """
        try:
            ended = self._task.wait(patience_s)
        except KeyboardInterrupt:
            raise BackendError(f"a Ctrl-C came while {self._window.name} was being stopped") from None
        if not ended:
            raise BackendError(
                f"stop() came from thread {self._caller}, but {self._window.name} belongs to "
                f"{self._window.thread.name}, which was in C code for all of {patience_s:g} s{fix}"
            )


class HeldWindow(Generic[WindowT]):
    """The window of one backend, if it has one. Dropped with the backend while it records, it is ended."""

    def __init__(self, backend: str) -> None:
        self.window: WindowT | None = None
        self._backend = backend
        self._when_dropped: weakref.finalize[[ThreadWindow, str], HeldWindow[WindowT]] | None = None

    def refuse_second(self) -> None:
        """Raises `ProfilerBusyError` while there is one."""
        if self.window is not None:
            raise ProfilerBusyError(f"{self.window.name} was not stopped. Fix: stop() before start()")

    def begin(self, made: WindowT) -> None:
        """Starts `made` on its thread; what that raises leaves none."""
        self.window = made
        try:
            begin_on_thread(made)
            self._when_dropped = weakref.finalize(self, _dropped, made, self._backend)
            self._when_dropped.atexit = False  # at exit the window is ended, and a stop() after that gets it
            if self.window is not made:  # a signal's handler has stopped it
                self._when_dropped.detach()
        except BaseException as error:
            if not isinstance(error, Exception):  # a Ctrl-C: it has begun, or is in the line of its thread
                end_on_thread(made)
            self._let_go()
            raise

    def advance(self) -> None:
        """One mini-batch is done."""
        if self.window is not None:
            run_on(self.window.thread, self.window.advance)

    def end(self) -> tuple[WindowT, Late | None] | None:
        """Ends the window. Waits up to 1 s for a thread that is in C code.

        Returns:
            The window, and what to wait for where its thread did not answer; None when there is no window.

        Raises:
            BackendError: this is a signal handler that interrupted the start or stop of this very window,
                which completes once the handler returns.
        """
        window = self.window
        if window is None:
            return None
        task = window.thread.submit(window.end)
        if not task.done and window.thread.is_current():
            raise BackendError(f"{window.name} is being started or stopped, beneath this signal handler")
        try:
            late = None if task.wait(ANSWER_S) else Late(window, task)
        except Exception:
            self._let_go()
            raise  # and not after a Ctrl-C: who ends it once more ends what still runs
        self._let_go()
        return window, late

    def _let_go(self) -> None:
        self.window = None
        if self._when_dropped is not None:
            self._when_dropped.detach()


class Cut(Protocol):
    """What one window recorded; it may end early."""

    truncated: str | None


CutT = TypeVar("CutT", bound=Cut)


class Kept(Generic[CutT]):
    """What a window recorded and nobody has taken, or why there is nothing."""

    def __init__(self) -> None:
        self.recorded: deque[CutT] = deque()
        self.lost: str | None = None

    def take(self, name: str) -> list[CutT]:
        """All of it, once. From any thread.

        Raises:
            BackendError: there is nothing, and this is why.
        """
        taken = []
        while self.recorded:
            taken.append(self.recorded.popleft())
        lost, self.lost = self.lost, None
        if lost is not None and not taken:
            raise BackendError(f"{name} is lost: {lost}")
        if lost is not None:
            taken[-1].truncated = taken[-1].truncated or lost
        return taken


def begin_on_thread(window: ThreadWindow) -> None:
    """Starts `window` where it belongs.

    Raises:
        BackendError: its thread does not come to it, and it will not start later either.
    """
    task = run_on(window.thread, window.begin, begin_s=BEGIN_S)
    if not task.done:
        task.cancel()
        raise BackendError(f"{window.name} cannot start: {window.thread.name} is busy with another window")


def end_on_thread(window: ThreadWindow) -> None:
    """Ends `window` where it belongs, whether it has begun or not, and before a Ctrl-C goes up, too."""
    try:
        run_on(window.thread, window.end)
    except KeyboardInterrupt:
        run_on(window.thread, window.end)
        raise


def about(window: Window) -> dict[str, object]:
    """What a recording says about itself, under the key `stepscope` of its metadata."""
    process = window.process
    return {
        "step": window.step,
        "role": process.role,
        "rank": process.rank,
        "world_size": process.world_size,
        "replica": process.replica,
        "stage": window.stage,
        "window": window.index,
        "process": process.key,
    }


def title(what: str, window: Window) -> str:
    """`the torch trace of update in step 7`."""
    stage = "" if window.stage is None else f" of {window.stage}"
    return f"the {what}{stage} in step {window.step}"


def _dropped(window: ThreadWindow, backend: str) -> None:
    """The backend was garbage-collected while it recorded. Any thread, at any moment: so nothing waits."""
    window.thread.submit(window.end)
    warnings.warn(
        f"{backend} was dropped while recording: {window.name} is lost. Fix: call stop()",
        ResourceWarning,
        stacklevel=2,
    )
