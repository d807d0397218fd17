"""The thread that a profiler window belongs to.

A torch.profiler session must be stopped by the thread that started it (any other segfaults), and by default
it records that thread alone. So every window has a thread, and everything done to the window is a `Task`
there:

* `MAIN`: a window opened by the main thread stays there, as in ordinary use of torch.profiler. Calls from
  elsewhere (a watchdog) reach the main thread as a pending call, which the interpreter runs between two
  bytecodes, within 5 ms or so while it runs Python. While it is blocked in C, or in a backward pass (whose
  Python code is hooks and recomputation), the call waits for it.
* `OWNER`: a daemon thread of ours, for windows opened by any other thread. Threads of a pool come and go, and
  an event loop's thread is not there at exit; this one always answers.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

ANSWER_S = 1.0
"""How long a call from another thread waits for the main thread to come out of C code."""
RETRY_S = 0.02
"""How often it is looked whether the main thread has come out of a backward pass."""


class Task:
    """One thing to do on a window's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._begun = threading.Event()
        self._done = threading.Event()
        self.error: BaseException | None = None
        """What the work raised."""

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
        """It does not run, unless it has begun."""
        self._work = None

    def wait(self, begin_s: float) -> bool:
        """Waits `begin_s` for it to begin, and then until it ends. False: it has not begun.

        Raises:
            BaseException: what the work raised. A Ctrl-C that came to the main thread in it ends that, too.
        """
        if self._begun.wait(begin_s):
            self._done.wait()
        if self.error is None:
            return self.done
        if isinstance(self.error, KeyboardInterrupt) and not MAIN.is_current():
            _thread.interrupt_main()
        raise self.error


class WindowThread(Protocol):
    """Runs tasks one at a time, in the order they came."""

    all_threads: bool
    """Whether a window here records every thread (it has to, when no recorded code runs here)."""

    @property
    def name(self) -> str: ...

    def is_current(self) -> bool: ...

    def submit(self, work: Callable[[], None]) -> Task:
        """Returns at once; on the thread itself the task is then done, unless it interrupts another one."""
        ...


class MainThread:
    """The interpreter's main thread."""

    all_threads = False

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._busy = False
        self._retries = False
        """Whether a thread waits to try again."""
        # Kept alive here: the interpreter holds a bare pointer to it.
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
            # -1 (32 calls are waiting) needs no answer: the next task on the main thread drains this one too.
            ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)
        return task

    def forget(self) -> None:
        """In the child of a fork, perhaps in the middle of a task of the parent's."""
        self._tasks, self._busy, self._retries = deque(), False, False

    def _on_pending_call(self, _: int | None) -> int:
        if not in_backward():
            self._drain()
        elif self._tasks and not self._retries:
            # torch keeps its sessions per operator there: what is stopped now would be back afterwards.
            self._retries = True
            try:
                threading.Thread(target=self._retry, name="stepscope-retry", daemon=True).start()
            except RuntimeError:  # no more threads: what is submitted next drains this too
                self._retries = False
        return 0

    def _retry(self) -> None:
        time.sleep(RETRY_S)
        self._retries = False
        ctypes.pythonapi.Py_AddPendingCall(self._pending_call, None)

    def _drain(self) -> None:
        # Signal handlers and pending calls interrupt tasks on this very thread: what they submit waits its
        # turn.
        while self._tasks and not self._busy:
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
        # Taken once and kept. Not `with`: a signal handler that comes in between must not wait for itself.
        if self._started.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()

    def forget(self) -> None:
        """In the child of a fork, where the thread is not."""
        self._tasks, self._thread, self._started = SimpleQueue(), None, threading.Lock()


MAIN = MainThread()
OWNER = OwnerThread()
os.register_at_fork(after_in_child=MAIN.forget)
os.register_at_fork(after_in_child=OWNER.forget)


def in_backward() -> bool:
    """Whether this thread is in a backward pass of torch: in a hook, say."""
    torch = sys.modules.get("torch")
    number = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return number is not None and number() != -1


def thread_for_window(all_threads: bool) -> WindowThread:
    """Where a window that the calling thread opens belongs."""
    return MAIN if MAIN.is_current() and not all_threads else OWNER


def run_on(thread: WindowThread, work: Callable[[], None], begin_s: float = ANSWER_S) -> Task:
    """Runs `work` on `thread`; waits at most `begin_s` for it to begin, and for its end.

    Returns:
        The task, not `done` when it has not begun: the thread does not answer, or it is this one, and this is
        a signal handler that interrupted another task. It then runs later, unless it is cancelled.

    Raises:
        BaseException: what the work raised.
    """
    task = thread.submit(work)
    if task.done or not thread.is_current():
        task.wait(begin_s)
    return task
