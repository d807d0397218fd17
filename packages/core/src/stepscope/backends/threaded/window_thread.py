"""The thread that a profiler window belongs to.

Only the thread that started a torch.profiler session may stop it (docs/torch-traps.md). So every window has a
thread, and each operation on the window is a `Task` on that thread:

* `MAIN`: a window that the main thread opens stays there, as in ordinary use of torch.profiler. Another
  thread (a watchdog) reaches the main thread through a pending call. The interpreter runs it between two
  bytecodes, within about 5 ms while it runs Python. The call waits while the main thread is blocked in C, or
  in a backward pass (whose Python code is hooks and recomputation).
* `OWNER`: a daemon thread of stepscope, for windows that any other thread opens. Pool threads come and go,
  and the thread of an event loop is gone at exit; this one always answers.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from stepscope.backends.protocol import Window
from stepscope.backends.threaded.undisturbed import undisturbed
from stepscope.errors import BackendError, ProfilerBusyError, is_users, ours

ANSWER_S = 1.0
"""The longest wait of a call from another thread for a main thread in C code."""
RETRY_S = 0.02
"""Interval between two checks for the end of a backward pass on the main thread."""


class Task:
    """One operation on a window's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._begun = threading.Event()
        self._done = threading.Event()
        self.error: BaseException | None = None
        """The exception that the work raised."""

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # cancelled
        self._begun.set()
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    def cancel(self) -> None:
        """Keep the task from running, unless it has begun."""
        self._work = None

    def wait(self, begin_s: float) -> bool:
        """Wait up to `begin_s` for the task to begin, then until it ends. Return False if it has not begun.

        Raises:
            BaseException: the exception of the work. A KeyboardInterrupt also interrupts the main thread.
        """
        if self._begun.wait(begin_s):
            self._done.wait()
        if self.error is None:
            return self.done
        if isinstance(self.error, KeyboardInterrupt) and not MAIN.is_current():
            _thread.interrupt_main()
        raise self.error


class WindowThread(Protocol):
    """A thread that runs tasks one at a time, in the order of their arrival."""

    all_threads: bool
    """True if a window here records every thread, because no recorded code runs on this one."""

    @property
    def name(self) -> str: ...

    def is_current(self) -> bool: ...

    def submit(self, work: Callable[[], None]) -> Task:
        """Queue `work` and return at once. If called on the thread itself, `work` runs before this returns,
        unless another task is running.
        """


class MainThread:
    """The interpreter's main thread, as a thread for windows."""

    all_threads = False

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._busy = False
        self._retries = False
        """True while a thread waits to retry a task."""
        # This attribute keeps it alive: the interpreter holds a bare pointer to it.
        self._pending_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_pending_call)

    @property
    def name(self) -> str:
        return threading.main_thread().name

    def is_current(self) -> bool:
        return threading.get_ident() == threading.main_thread().ident

    def submit(self, work: Callable[[], None]) -> Task:
        task = Task(work)
        self._tasks.append(task)
        if self.is_current():
            self._drain()
        else:
            # -1 (32 calls are waiting) needs no reaction: the next task on the main thread drains this one.
            ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)
        return task

    def forget(self) -> None:
        """Drop all tasks in a forked child; the fork may have happened inside of a task of the parent."""
        self._tasks, self._busy, self._retries = deque(), False, False

    def _on_pending_call(self, _: int | None) -> int:
        if not in_backward():
            try:
                self._drain()
            except BaseException as error:  # of a handler that waited for a task's end
                _raise_on_main(error)
        elif self._tasks and not self._retries:
            # torch restores its sessions after each operator there: a stopped one would come back.
            self._retries = True
            try:
                threading.Thread(target=self._retry, name="stepscope-retry", daemon=True).start()
            except ours(RuntimeError):  # no more threads: the next task drains this one too
                self._retries = False
        return 0

    def _retry(self) -> None:
        time.sleep(RETRY_S)
        self._retries = False
        ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)

    def _drain(self) -> None:
        # Signal handlers and pending calls interrupt tasks on this very thread: their own tasks wait.
        while self._tasks and not self._busy:
            undisturbed(self._do_next)

    def _do_next(self) -> None:
        self._busy = True
        try:
            self._tasks.popleft().run()
        finally:
            self._busy = False


class OwnerThread:
    """A daemon thread, started with the first task."""

    all_threads = True
    name = "stepscope-profiler"

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()  # a signal handler may put() in the middle of put()
        self._thread: threading.Thread | None = None
        self._started = threading.Lock()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], None]) -> Task:
        task = Task(work)
        self._tasks.put(task)
        # Taken once and never released. Not `with`: a signal handler in between must not wait for itself.
        if self._started.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()

    def forget(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        self._tasks, self._thread, self._started = SimpleQueue(), None, threading.Lock()


MAIN = MainThread()
OWNER = OwnerThread()
os.register_at_fork(after_in_child=MAIN.forget)
os.register_at_fork(after_in_child=OWNER.forget)


def _raise_on_main(error: BaseException) -> None:
    """Raise a copy of an error on the main thread soon, because ctypes drops an error of its pending call."""
    kind = type(error)
    copy = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *error.args)})

    def raise_there() -> None:
        time.sleep(RETRY_S)  # the pending call is over then
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(copy))

    threading.Thread(target=raise_there, name="stepscope-retry", daemon=True).start()


def in_backward() -> bool:
    """Return whether this thread is in a backward pass of torch, for example in a hook."""
    torch = sys.modules.get("torch")
    number = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return number is not None and number() != -1


def thread_for_window(all_threads: bool) -> WindowThread:
    """Return the thread for a window that the calling thread opens."""
    return MAIN if MAIN.is_current() and not all_threads else OWNER


def run_on(thread: WindowThread, work: Callable[[], None], begin_s: float = ANSWER_S) -> Task:
    """Run `work` on `thread`. Wait at most `begin_s` until it begins, then until it ends.

    Returns:
        The task. It is not `done` if it has not begun, because the thread does not answer, or the caller is a
        signal handler that interrupted another task of this thread. It then runs later, unless it is
        cancelled.

    Raises:
        BaseException: the exception of the work.
    """
    task = thread.submit(work)
    if task.done or not thread.is_current():
        task.wait(begin_s)
    return task


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
