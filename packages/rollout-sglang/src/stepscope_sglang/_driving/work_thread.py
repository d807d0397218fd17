"""One thread for all work that may wait, in order.

Work of a caller that gave up is over before the next work begins.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class WorkThread:
    """Thread that starts with the first work.

    It is a daemon, unlike an executor's threads: an engine that never answers must not keep the interpreter
    from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Submit work, which is done even if nobody waits for it. The future cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(run)
        return future

    def _work(self) -> None:
        while True:
            self._queue.get()()
