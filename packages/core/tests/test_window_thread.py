"""Work reaches the thread that a profiler window belongs to, and one process holds one profiler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

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
from stepscope.testing.backend_conformance import in_child, in_thread

threads = pytest.mark.parametrize("thread", [MAIN, OWNER], ids=["main", "owner"])


def test_a_window_belongs_to_the_main_thread_if_that_opens_it_and_else_to_ours() -> None:
    assert thread_for_window(all_threads=False) is MAIN
    assert thread_for_window(all_threads=True) is OWNER
    assert in_thread(lambda: thread_for_window(all_threads=False)) is OWNER


def test_our_thread_can_be_told_by_its_name_and_does_not_keep_the_process_alive() -> None:
    seen: list[threading.Thread] = []
    run_on(OWNER, lambda: seen.append(threading.current_thread()))
    assert [(thread.name, thread.daemon) for thread in seen] == [("stepscope-profiler", True)]


@threads
def test_work_runs_on_the_windows_thread_whoever_asks(thread: WindowThread) -> None:
    def where() -> tuple[bool, bool]:
        checks: list[bool] = []
        return run_on(thread, lambda: checks.append(thread.is_current())).done, checks[0]

    assert where() == (True, True)
    assert in_thread(where) == (True, True)


@threads
def test_what_the_work_raises_is_raised_where_it_was_asked_for(thread: WindowThread) -> None:
    def fail() -> None:
        raise KeyError("the work")

    with pytest.raises(KeyError, match="the work"):
        run_on(thread, fail)
    assert run_on(thread, lambda: None).done


@threads
def test_work_keeps_its_order(thread: WindowThread) -> None:
    order: list[int] = []

    def ask() -> Task:
        for number in range(50):
            thread.submit(lambda number=number: order.append(number))  # type: ignore[misc]
        return run_on(thread, lambda: None, begin_s=30)

    assert in_thread(ask).done
    assert order == list(range(50))


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


def test_a_main_thread_that_does_not_answer_is_waited_for_and_then_left() -> None:
    tasks: list[Task] = []
    asking = threading.Thread(target=lambda: tasks.append(run_on(MAIN, lambda: None, begin_s=0.01)))
    answered: list[bool] = []

    def busy() -> None:
        asking.start()
        asking.join()
        answered.append(tasks[0].done)

    MAIN.submit(busy)
    assert answered == [False]
    assert tasks[0].wait(begin_s=30)


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

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        run_on(thread, interrupted)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked[0].wait(begin_s=30)
    assert order == ["interrupted", "handler"]


@threads
def test_it_works_in_the_child_of_a_fork_in_the_middle_of_a_task(thread: WindowThread) -> None:
    def works() -> bool:
        return run_on(thread, lambda: None, begin_s=20).done

    passed: list[bool] = []
    run_on(thread, lambda: passed.append(in_child(works)))
    assert passed == [True]


class TestProcessLock:
    def test_the_second_one_is_told_who_has_it(self) -> None:
        lock = ProcessLock()
        lock.acquire("trace of step 2")
        with pytest.raises(ProfilerBusyError, match=r"step 3 .* step 2 "):
            lock.acquire("trace of step 3")
        assert lock.holder == "trace of step 2"

    def test_any_thread_may_give_it_back(self) -> None:
        lock = ProcessLock()
        lock.acquire("one")
        in_thread(lock.release)
        assert lock.holder is None
        lock.acquire("another")

    def test_one_of_many_threads_gets_it(self) -> None:
        lock = ProcessLock()
        start = threading.Barrier(8)
        refused: list[Exception] = []

        def race(number: int) -> Callable[[], None]:
            def run() -> None:
                start.wait()
                try:
                    lock.acquire(f"thread {number}")
                except ProfilerBusyError as error:
                    refused.append(error)

            return run

        racing = [threading.Thread(target=race(number)) for number in range(8)]
        for thread in racing:
            thread.start()
        for thread in racing:
            thread.join()
        assert len(refused) == 7
        assert lock.holder is not None
