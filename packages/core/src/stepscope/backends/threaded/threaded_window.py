"""The life of a window that belongs to a thread: there is one at a time, any thread can stop it, and it is
always ended.

The window itself holds the profiler (`torch.window`). This module guards the start, runs the stop on the
window's thread, and keeps the window if that thread does not answer.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Generic, Protocol, TypeVar

from stepscope.backends.protocol import Window
from stepscope.backends.threaded.window_thread import ANSWER_S, Task, WindowThread, run_on
from stepscope.errors import BackendError, ProfilerBusyError, is_users, ours

BEGIN_S = 60
"""The longest wait of a start for its thread, which may be ending the previous window."""


class ThreadWindow(Protocol):
    """One stretch of recording. `begin`, `advance` and `end` run on its thread alone."""

    name: str
    thread: WindowThread

    def begin(self) -> None: ...
    def advance(self) -> None: ...
    def end(self) -> None: ...


WindowT = TypeVar("WindowT", bound=ThreadWindow)


class Late:
    """A window whose thread has not ended it yet."""

    def __init__(self, window: ThreadWindow, task: Task) -> None:
        self._window = window
        self._task = task
        self._caller = threading.current_thread().name
        self.note = f"stopped by thread {self._caller}, ended when {window.thread.name} came to it"
        """The note for the manifest. Nothing is lost: the recording may hold work from after the stop."""
        self.cut: str | None = None
        """The reason why a written recording is incomplete; set when the window ends."""

    def wait(self, patience_s: float, fix: str = "") -> None:
        """Wait until the window has ended.

        Raises:
            BackendError: the window has not ended in time. The message ends with `fix`.
        """
        try:
            ended = self._task.wait(patience_s)
        except KeyboardInterrupt:
            raise BackendError(f"Ctrl-C interrupted the stop of {self._window.name}") from None
        if not ended:
            raise BackendError(
                f"stop() came from thread {self._caller}, but {self._window.name} belongs to "
                f"{self._window.thread.name}, which was in C code for all of {patience_s:g} s{fix}"
            )


class HeldWindow(Generic[WindowT]):
    """The window of one backend, or None. If a backend is dropped while it records, its window is ended."""

    def __init__(self, backend: str) -> None:
        self.window: WindowT | None = None
        self._backend = backend
        self._when_dropped: weakref.finalize[[ThreadWindow, str], HeldWindow[WindowT]] | None = None

    def refuse_second(self) -> None:
        """Raise `ProfilerBusyError` while a window is open."""
        if self.window is not None:
            raise ProfilerBusyError(f"{self.window.name} was not stopped. Fix: stop() before start()")

    def begin(self, window: WindowT) -> None:
        """Start `window` on its thread. If the start fails, no window is held. After a Ctrl-C the window is
        held, because it has begun or waits in its thread's queue, and `end` ends it.
        """
        self.window = window
        try:
            begin_on_thread(window)
        except ours():
            self.window = None
            raise
        self._when_dropped = weakref.finalize(self, _dropped, window, self._backend)
        self._when_dropped.atexit = False  # the exit hook ends the window, and a later stop() gets it

    def advance(self) -> None:
        """Advance the window by one mini-batch."""
        if self.window is not None:
            run_on(self.window.thread, self.window.advance)

    def end(self) -> tuple[WindowT, Late | None] | None:
        """End the window. Wait up to 1 s for a thread that is in C code.

        Returns:
            The window, with a `Late` if its thread did not answer; None if there is no window.
        """
        window = self.window
        if window is None:
            return None
        task = window.thread.submit(window.end)
        try:
            late = None if task.wait(ANSWER_S) else Late(window, task)
        except ours():
            self._release()
            raise  # a Ctrl-C keeps the window: a second end() ends what still runs
        self._release()
        return window, late

    def _release(self) -> None:
        self.window = None
        if self._when_dropped is not None:
            self._when_dropped.detach()


def begin_on_thread(window: ThreadWindow) -> None:
    """Start `window` on its thread.

    Raises:
        BackendError: the window's thread is busy. The window will not start later either.
    """
    task = run_on(window.thread, window.begin, begin_s=BEGIN_S)
    if not task.done:
        task.cancel()
        raise BackendError(f"{window.name} cannot start: {window.thread.name} is busy with another window")


def end_on_thread(window: ThreadWindow) -> None:
    """End `window` on its thread, even if it has not begun. A Ctrl-C is raised after the window has ended."""
    try:
        run_on(window.thread, window.end)
    except BaseException as error:
        if is_users(error):
            run_on(window.thread, window.end)
        raise


def about(window: Window) -> dict[str, object]:
    """Return the metadata of a recording, for the key `stepscope` in its trace."""
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


def title(recording: str, window: Window) -> str:
    """Return the name of a recording for messages: `the torch trace of update in step 7`."""
    stage = "" if window.stage is None else f" of {window.stage}"
    return f"the {recording}{stage} in step {window.step}"


def _dropped(window: ThreadWindow, backend: str) -> None:
    """End the window of a backend that was garbage-collected while it recorded.

    This may run on any thread at any moment, so it does not wait.
    """
    window.thread.submit(window.end)
    warnings.warn(
        f"{backend} was dropped while recording: {window.name} is lost. Fix: call stop()",
        ResourceWarning,
        stacklevel=2,
    )
