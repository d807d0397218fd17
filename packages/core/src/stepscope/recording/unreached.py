"""Says at the end of a program that no step ever began, where the configuration says what begins one.

A preset that does not fit, or a function that the loop does not call, would otherwise leave nothing behind
and say nothing. One process of a run speaks: the one that `stepscope run` became, or else each that read the
configuration by itself. The first capture of any process leaves a mark for it in the run's folder.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress

from stepscope.config import ProfileConfig
from stepscope.files.layout import RunLayout
from stepscope.files.unreached import Unreached, write_unreached
from stepscope.recording import guard

MAIN = "STEPSCOPE_RUN_PID"
"""Set by `stepscope run`: the program's process id. If that is Python, it says so to its children."""
_IS_PYTHON = " python"

_watched: ProfileConfig | None = None
"""What is looked at when this process ends. One writer: `watch`."""
_reached: set[str] = set()
"""Folders of runs in which this process knows of a step. One writer: `reached`."""
_pid = 0
"""Of the process that watches: a forked child says nothing."""


def watch(config: ProfileConfig) -> None:
    """This process read a configuration that lists functions, by itself: see to it that some step begins."""
    global _watched, _pid
    if _watched is None:
        atexit.register(_at_exit)
    _watched, _pid = config, os.getpid()
    if os.environ.get(MAIN) == str(_pid):
        os.environ[MAIN] += _IS_PYTHON


def reached(config: ProfileConfig) -> None:
    """A step begins, captured or not."""
    if config.save_path in _reached:
        return
    _reached.add(config.save_path)
    from stepscope.recording import run

    mark = RunLayout(config.save_path).reached(run.run_id())
    with suppress(OSError):  # nothing can be written there, and the captures will say so
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(mode=0o600)


def _at_exit() -> None:
    try:
        if _watched is not None and os.getpid() == _pid and _speaks():
            _judge(_watched)
    except Exception as error:
        guard.note("looking whether any step began", error)


def _speaks() -> bool:
    """Whether it is this process that speaks for its run."""
    main = os.environ.get(MAIN)
    if main is not None and main.endswith(_IS_PYTHON):
        return main == f"{os.getpid()}{_IS_PYTHON}"
    in_ray = os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"
    return not in_ray and os.environ.get("RANK", "0") == "0"


def _judge(config: ProfileConfig) -> None:
    from socket import gethostname

    from stepscope.recording import instrumented, run

    layout, run_id = RunLayout(config.save_path), run.run_id()
    boundaries = instrumented.boundaries()
    if not boundaries or config.save_path in _reached or layout.reached(run_id).exists():
        return
    if os.environ.get(MAIN) is None and not any("was patched" in each for each in boundaries):
        return  # a process of another kind: it does not even import the framework
    record = Unreached(
        run_id=run_id,
        at_ns=time.time_ns(),
        host=gethostname(),
        pid=os.getpid(),
        command=tuple(sys.argv),
        boundaries=tuple(boundaries),
    )
    sys.stderr.write(f"stepscope: {record}\n")
    write_unreached(layout, record)
