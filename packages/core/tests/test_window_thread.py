"""Work reaches the thread that a profiler window belongs to, and one process holds one profiler."""

from __future__ import annotations

import signal
import threading

import pytest

from packages.core.tests.runs import at_once, handling
from stepscope.backends.process_lock import ProcessLock
from stepscope.backends.window_thread import (
    MAIN,
    OWNER,
    Task,
    WindowThread,
    run_on,
    thread_for_window,
)
from stepscope.errors import ProfilerBusyError
from stepscope.testing.backend_conformance import in_thread

threads = pytest.mark.parametrize("thread", [MAIN, OWNER], ids=["main", "owner"])


def test_a_window_belongs_to_the_main_thread_if_that_opens_it_and_else_to_ours() -> None:
    assert thread_for_window(all_threads=False) is MAIN
    assert thread_for_window(all_threads=True) is OWNER
    assert in_thread(lambda: thread_for_window(all_threads=False)) is OWNER


def test_more_calls_wait_than_the_interpreter_has_room_for() -> None:
    tasks: list[Task] = []

    def ask() -> None:
        tasks.extend(MAIN.submit(lambda: None) for _ in range(200))

    asking = threading.Thread(target=ask)

    def while_the_main_thread_is_busy() -> None:
        asking.start()
        asking.join()

    MAIN.submit(while_the_main_thread_is_busy)
    run_on(MAIN, lambda: None)
    assert all(task.done for task in tasks)


def test_a_ctrl_c_in_the_work_of_another_thread_reaches_the_main_thread_too() -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            run_on(MAIN, lambda: signal.raise_signal(signal.SIGINT), begin_s=30)
        except KeyboardInterrupt as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            asking.join(0.01)
    asking.join()
    assert len(errors) == 1


def test_a_cancelled_task_does_not_run() -> None:
    ran: list[str] = []
    asked: list[Task] = []

    def busy() -> None:
        asked.append(MAIN.submit(lambda: ran.append("cancelled")))
        asked[0].cancel()

    MAIN.submit(busy)
    assert not ran
    assert not asked[0].done


@threads
def test_a_signal_handler_does_not_wait_for_what_it_interrupts(thread: WindowThread) -> None:
    order: list[str] = []
    asked: list[Task] = []

    def handler(*_: object) -> None:
        asked.append(run_on(thread, lambda: order.append("handler"), begin_s=0.01))

    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)
        order.append("interrupted")

    with handling(signal.SIGUSR1, handler):
        run_on(thread, interrupted)
    assert asked[0].wait(begin_s=30)
    assert order == ["interrupted", "handler"]


class TestProcessLock:
    def test_one_of_many_threads_gets_it(self) -> None:
        lock = ProcessLock()
        refused: list[Exception] = []

        def take(number: int) -> None:
            try:
                lock.acquire(f"thread {number}")
            except ProfilerBusyError as error:
                refused.append(error)

        at_once(8, take)
        assert len(refused) == 7
        assert lock.holder is not None
