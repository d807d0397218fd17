"""The thread on which a profiler window starts, advances and ends.

Only the thread that started a torch.profiler session may stop it (docs/torch-traps.md). So every window
belongs to a thread, and each operation on the window is a `Task` on that thread:

* `MAIN`: a window that the main thread opens belongs to the main thread, as in ordinary use of
  torch.profiler, unless it records all threads. Another thread (a watchdog) submits tasks through a pending
  call of the interpreter, which runs on the main thread within about 5 ms. A task is delayed while the main
  thread is in C code or in a backward pass.
* `OWNER`: a daemon thread of stepscope, for all other windows. Threads of pools and event loops
  may end before the window does; this thread does not.
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
from stepscope.backends.undisturbed import undisturbed
from stepscope.errors import BackendError, ProfilerBusyError, is_users, ours

ANSWER_S = 1.0
"""Longest time in seconds that another thread waits for a main thread in C code."""
RETRY_S = 0.02
"""Interval in seconds of checks whether a backward pass on the main thread has ended."""


class Task:
    """One operation on a window's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._begun = threading.Event()
        self._done = threading.Event()
        self.error: BaseException | None = None
        """The exception that the work raised, or None."""

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
        """Prevent the task from running, if it has not begun."""
        self._work = None

    def wait(self, begin_s: float) -> bool:
        """Wait up to `begin_s` for the task to begin, then until it has ended. Return False if it did not
        begin.

        Raises:
            BaseException: the exception of the work. If it is a KeyboardInterrupt, the main thread is
                interrupted too.
        """
        if self._begun.wait(begin_s):
            self._done.wait()
        if self.error is None:
            return self.done
        if isinstance(self.error, KeyboardInterrupt) and not MAIN.is_current():
            _thread.interrupt_main()
        raise self.error


class WindowThread(Protocol):
    """A thread that runs tasks one at a time, in the order of submission."""

    all_threads: bool
    """True if windows of this thread record all threads of the process, because no recorded code runs on this
    thread."""

    @property
    def name(self) -> str: ...

    def is_current(self) -> bool: ...

    def submit(self, work: Callable[[], None]) -> Task:
        """Queue `work` and return without waiting. On the thread itself, `work` runs before `submit` returns,
        unless another task is running.
        """


class MainThread:
    """The main thread of the interpreter, as a `WindowThread`."""

    all_threads = False

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._busy = False
        self._retries = False
        """True while a thread waits to retry the queued tasks."""
        # An attribute, to keep the function alive: the interpreter has only a C pointer to it.
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
            # The result -1 (32 calls are pending) may be ignored: the next task on the main thread drains the
            # queue.
            ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)
        return task

    def forget(self) -> None:
        """Drop all tasks in a forked child. The parent may have forked within a task."""
        self._tasks, self._busy, self._retries = deque(), False, False

    def _on_pending_call(self, _: int | None) -> int:
        if not in_backward():
            try:
                self._drain()
            except BaseException as error:  # an exception of a signal handler whose close waited for the task
                _raise_on_main(error)
        elif self._tasks and not self._retries:
            # In a backward pass, torch restores the session after each operator: a stopped session would come
            # back.
            self._retries = True
            try:
                threading.Thread(target=self._retry, name="stepscope-retry", daemon=True).start()
            except ours(RuntimeError):  # no more threads can start: the next task drains the queue
                self._retries = False
        return 0

    def _retry(self) -> None:
        time.sleep(RETRY_S)
        self._retries = False
        ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)

    def _drain(self) -> None:
        # A signal handler or pending call may interrupt a task on this thread and submit another: that task
        # waits.
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
        self._tasks: SimpleQueue[Task] = SimpleQueue()  # reentrant, because put() may interrupt put()
        self._thread: threading.Thread | None = None
        self._started = threading.Lock()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], None]) -> Task:
        task = Task(work)
        self._tasks.put(task)
        # The lock is acquired once and never released. `with` could deadlock in a signal handler.
        if self._started.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()

    def forget(self) -> None:
        """Reset in a forked child, which does not have this thread."""
        self._tasks, self._thread, self._started = SimpleQueue(), None, threading.Lock()


MAIN = MainThread()
OWNER = OwnerThread()
os.register_at_fork(after_in_child=MAIN.forget)
os.register_at_fork(after_in_child=OWNER.forget)


def _raise_on_main(error: BaseException) -> None:
    """Raise a copy of `error` on the main thread a little later, because ctypes drops exceptions of a pending
    call.
    """
    kind = type(error)
    copy = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *error.args)})

    def raise_there() -> None:
        time.sleep(RETRY_S)  # until the pending call has returned
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(copy))

    threading.Thread(target=raise_there, name="stepscope-retry", daemon=True).start()


def in_backward() -> bool:
    """Return whether the calling thread is in a backward pass of torch, for example in a hook."""
    torch = sys.modules.get("torch")
    number = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return number is not None and number() != -1


def thread_for_window(all_threads: bool) -> WindowThread:
    """Return the thread for a window that the calling thread opens."""
    return MAIN if MAIN.is_current() and not all_threads else OWNER


def run_on(thread: WindowThread, work: Callable[[], None], begin_s: float = ANSWER_S) -> Task:
    """Run `work` on `thread`. Wait up to `begin_s` for it to begin, then until it has ended.

    Returns:
        The task. It is not `done` if the thread did not answer, or if the caller is a signal handler that
            interrupted another task of the thread. Then the task runs later, unless it is cancelled.

    Raises:
        BaseException: the exception of the work.
    """
    task = thread.submit(work)
    if task.done or not thread.is_current():
        task.wait(begin_s)
    return task


BEGIN_S = 60
"""Longest time in seconds that the start of a window waits for its thread, which may be ending another
window."""


class ThreadWindow(Protocol):
    """A window. `begin`, `advance` and `end` run only on `thread`."""

    name: str
    thread: WindowThread

    def begin(self) -> None: ...
    def advance(self) -> None: ...
    def end(self) -> None: ...


WindowT = TypeVar("WindowT", bound=ThreadWindow)


class Late:
    """A window that was stopped, but whose thread has not ended it yet."""

    def __init__(self, window: ThreadWindow, task: Task) -> None:
        self._window = window
        self._task = task
        self._caller = threading.current_thread().name
        self.note = f"stopped by thread {self._caller}, ended when {window.thread.name} came to it"
        """Note for the manifest on a complete recording, which may also contain work after the stop."""
        self.cut: str | None = None
        """The reason why the recording is incomplete, or None; known once the recording is written."""

    def wait(self, patience_s: float, fix: str = "") -> None:
        """Wait until the window has ended.

        Raises:
            BackendError: the window did not end within `patience_s`. The message ends with `fix`.
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
    """Holder of a backend's window; empty while the backend is idle. If the backend is garbage-collected
    while it records, the window ends.
    """

    def __init__(self, backend: str) -> None:
        self.window: WindowT | None = None
        self._backend = backend
        self._when_dropped: weakref.finalize[[ThreadWindow, str], HeldWindow[WindowT]] | None = None

    def refuse_second(self) -> None:
        """Raise `ProfilerBusyError` if a window is open."""
        if self.window is not None:
            raise ProfilerBusyError(f"{self.window.name} was not stopped. Fix: stop() before start()")

    def begin(self, window: WindowT) -> None:
        """Start `window` on its thread. If the start fails, the window is not kept. After a Ctrl-C the window
        is kept, because it has begun or may still begin; `end` then ends it.
        """
        self.window = window
        try:
            begin_on_thread(window)
        except ours():
            self.window = None
            raise
        self._when_dropped = weakref.finalize(self, _dropped, window, self._backend)
        self._when_dropped.atexit = False  # at exit, the backend's hook ends it

    def advance(self) -> None:
        """Advance the window by one mini-batch."""
        if self.window is not None:
            run_on(self.window.thread, self.window.advance)

    def end(self) -> tuple[WindowT, Late | None] | None:
        """End the window. Wait up to 1 s for its thread, which may be in C code.

        Returns:
            (the window, a `Late` if its thread did not answer in time, else None); None if there is no
            window.
        """
        window = self.window
        if window is None:
            return None
        task = window.thread.submit(window.end)
        try:
            late = None if task.wait(ANSWER_S) else Late(window, task)
        except ours():
            self._release()
            raise  # after a Ctrl-C the window is kept, and a second end() ends it
        self._release()
        return window, late

    def _release(self) -> None:
        self.window = None
        if self._when_dropped is not None:
            self._when_dropped.detach()


def begin_on_thread(window: ThreadWindow) -> None:
    """Start `window` on its thread.

    Raises:
        BackendError: the window's thread is busy. The window will not start later.
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
    """Return the metadata of a window, for the key `stepscope` in its trace."""
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
    """End the window of a backend that was garbage-collected while recording.

    The garbage collector calls this function on any thread at any moment, so the function must not wait.
    """
    window.thread.submit(window.end)
    warnings.warn(
        f"{backend} was dropped while recording: {window.name} is lost. Fix: call stop()",
        ResourceWarning,
        stacklevel=2,
    )
