"""The thread for all work of one owner: its order, its errors and its end."""

from __future__ import annotations

import subprocess
import sys
import threading

from stepscope.engines.own_thread import WorkThread


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
