"""The flight recorder that stands in this process, if any."""

from __future__ import annotations

from stepscope._recording.process import fork, shutdown
from stepscope._recording.recorder.recorder import Recorder
from stepscope._recording.recorder.watch import Watch
from stepscope._recording.session import activation
from stepscope.config import ProfileConfig
from stepscope.files.manifest.records import Ending
from stepscope.files.sidecar import ProcessInfo

_standing: Recorder | None = None
"""Writers: `start`, `stop`, and `_forget` in a forked child."""
_watch: Watch | None = None
"""Its thread; likewise."""


def standing() -> Recorder | None:
    """Return this process' recorder; None while it is off."""
    return _standing


def start(config: ProfileConfig, process: ProcessInfo, run_id: str, *, owner: bool = False) -> Recorder:
    """Start this process' recorder, or return the one that stands for the same folder and run.

    Args:
        owner: Whether this process bounds steps.
    """
    global _standing, _watch
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
    """Stop it. What it was told to write is written."""
    global _standing, _watch
    activation.keep(None)
    if _watch is not None:
        _watch.stop()
    if _standing is not None:
        _standing.stop()
    _standing = _watch = None


def _end(ending: Ending, deadline_s: float) -> None:
    """Write what a signal triggers, and wait for all that was triggered."""
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
    if _watch is not None and ending.by != "signal":  # a process may go on after a signal
        _watch.stop()


def _forget() -> None:
    global _standing, _watch
    _standing = _watch = None  # the child has the objects and not the threads


shutdown.on_exit("the flight recorder", _end, order=5)
fork.forgets("flight recorder", _forget)
