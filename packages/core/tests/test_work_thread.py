"""The thread for all work of one owner: its order, its errors and its end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from stepscope.engines.own_thread import WorkThread


def test_an_error_reaches_the_caller_and_the_next_work_is_done() -> None:
    thread = WorkThread("stepscope-test")
    failed = thread.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert thread.submit(lambda: 2).result(10) == 2


def test_the_thread_ends_with_its_owner() -> None:
    thread = WorkThread("stepscope-test")
    worker = thread.submit(threading.current_thread).result(10)
    del thread
    worker.join(10)
    assert not worker.is_alive()


def test_work_that_never_ends_does_not_keep_a_process_from_ending() -> None:
    script = (
        "import threading; from stepscope.engines.own_thread import WorkThread; "
        "thread = WorkThread('stepscope-test'); thread.submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
