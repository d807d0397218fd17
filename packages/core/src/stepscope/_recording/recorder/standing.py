"""The flight recorder of this process, and the thread that polls for orders."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from stepscope._recording.process import failures, fork, shutdown
from stepscope._recording.recorder.recorder import Recorder
from stepscope._recording.session import activation
from stepscope._recording.spans import collective_calls, slot
from stepscope.config import ProfileConfig
from stepscope.errors import RecordError, ours
from stepscope.files.manifest import Ending
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.steps import WHY, Order
from stepscope.files.storage import read_record

LONGEST_S = 0.5
"""Longest time between two checks for orders. A check is one `stat`. `stepscope why` waits for the next
check."""


class Watch:
    """The thread that checks for orders and hangs, for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._folder = recorder.layout.orders
        self._seen: int | None = None
        """Modification time of the folder at the last check."""
        self._read: set[str] = set()
        """File names of orders that were read, or that are older than this thread."""
        self._progress: tuple[int, int] = (0, 0)
        """(number of the last span, number of the running step or -1) at the last check."""
        self._still_since = time.monotonic()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="stepscope-recorder-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        self._read.update(self._old_orders())
        pause_s = min(LONGEST_S, self._recorder.config.control.poll_seconds)
        while not self._stop.wait(pause_s):
            try:
                if self._recorder is slot.active:  # a worker may initialise torch.distributed at any time
                    collective_calls.watch(self._recorder.config.collectives)
                self._look_for_orders()
                self._look_for_hang()
            except ours() as error:
                failures.note("watching for orders of the flight recorder", error)

    def _old_orders(self) -> Iterator[str]:
        """Yield the file names of orders that are older than this thread. Later checks compare names and
        not times, so that a jump of the clock has no effect.
        """
        before_s = time.time() - 1
        for path in self._folder.glob("[!.]*.json"):
            with suppress(OSError):
                if path.stat().st_mtime < before_s:
                    yield path.name

    def _look_for_orders(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except ours(OSError):
            return
        if changed == self._seen:
            return
        self._seen = changed
        for path in sorted(self._folder.glob("[!.]*.json")):
            if path.name in self._read:
                continue
            self._read.add(path.name)
            try:
                order = read_record(path, Order)
            except ours(OSError, RecordError) as error:
                failures.warn("stepscope: an order of the flight recorder cannot be read: %s", error)
                continue
            recorder = self._recorder
            if order.run_id not in ("", recorder.run_id):
                continue
            if order.trigger == WHY:
                recorder.write_state(path.stem)
            elif not order.steps:
                recorder.serve(order)
            else:
                recorder.obey(order)

    def _look_for_hang(self) -> None:
        recorder = self._recorder
        step, now = recorder.steps.running, time.monotonic()
        progress = (recorder.log.last_id, -1 if step is None else step.number)
        if progress != self._progress or step is None:
            self._progress, self._still_since = progress, now
            return
        still_s = now - self._still_since
        if still_s >= recorder.config.recorder.hang_seconds and not step.is_written:
            recorder.fire("hang", f"no span has begun for {still_s:.0f} s")


_standing: Recorder | None = None
"""The flight recorder of this process, or None. Writers: `start`, `stop`, and `_forget` in a forked child."""
_watch: Watch | None = None
"""The thread of `_standing`, or None. Its writers are those of `_standing`."""
_starting = threading.RLock()  # reentrant, because a signal handler may call start()
"""Lock of `start`, so that threads that open captures at the same time make only one recorder."""


def standing() -> Recorder | None:
    """Return this process' recorder, or None if it was not started."""
    return _standing


def start(config: ProfileConfig, process: ProcessInfo, run_id: str, *, owner: bool = False) -> Recorder:
    """Start this process' recorder, or return the running recorder if it is for the same folder and run.

    Args:
        owner: True for the process that runs the training loop.
    """
    global _standing, _watch
    with _starting:
        recorder = _standing
        if recorder is not None:
            if (recorder.config.save_path, recorder.run_id) == (config.save_path, run_id):
                return recorder
            stop()
        shutdown.install()
        recorder = _standing = Recorder(config, process, run_id, owner=owner)
        recorder.sample()
        _watch = Watch(recorder)
        activation.keep(recorder)
        return recorder


def stop() -> None:
    """Stop the recorder. Steps that were triggered are still written."""
    global _standing, _watch
    activation.keep(None)
    if _watch is not None:
        _watch.stop()
    if _standing is not None:
        _standing.stop()
    _standing = _watch = None


def _end(ending: Ending, deadline_s: float) -> None:
    """After SIGTERM, trigger a write of the last steps. Then wait until all triggered steps are written."""
    recorder = _standing
    if recorder is None:
        return
    running = recorder.steps.running
    if ending.by == "signal" and running is not None:
        running.ending = ending
        recorder.fire("signal", ending.error)
    elif ending.by == "signal":
        recorder.ask_for_order(ending.error)
    recorder.drain(deadline_s)
    if _watch is not None and ending.by != "signal":  # a process may continue after a signal
        _watch.stop()


def _forget() -> None:
    global _standing, _watch, _starting
    _standing = _watch = None  # a forked child does not have the threads
    _starting = threading.RLock()


shutdown.on_exit("the flight recorder", _end, order=5)
fork.forgets("flight recorder", _forget)
