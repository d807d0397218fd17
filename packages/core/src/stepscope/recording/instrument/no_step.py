"""Says at the end of a program that no step ever began, where the configuration says what begins one.

A preset that does not fit, or a function that the loop does not call, would otherwise leave nothing behind
and say nothing. One process of a run speaks: the one that `stepscope run` became, or else each that read the
configuration by itself. The first capture of any process leaves a mark for it in the run's folder, and one in
Ray's key-value store: an actor's host may have that folder on a disk of its own.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from stepscope.config import ProfileConfig
from stepscope.files.layout import RunLayout
from stepscope.files.unreached import Unreached, write_unreached
from stepscope.recording.process import failures, run
from stepscope.recording.process.failures import describe

MAIN = "STEPSCOPE_RUN_PID"
"""Set by `stepscope run`: the program's process id. If that is Python, it says so to its children."""
_IS_PYTHON = " python"
_NAMESPACE = b"stepscope"
"""Of our keys in Ray's store."""
_RAY_S = 30.0
"""For Ray's answer: its cluster may be dead, or busy."""

_watched: ProfileConfig | None = None
"""What is looked at when this process ends. One writer: `watch`."""
_reached: set[str] = set()
"""Folders of runs in which this process knows of a step. One writer: `reached`."""
_steps: tuple[int, int] | None = None
"""The lowest and the latest step that began in this process. One writer: `reached`."""
_selected = False
"""Whether one of them was selected. One writer: `reached`."""
_pid = 0
"""Of the process that watches: a forked child says nothing."""
_asked = False
"""Whether Ray said at the end what the processes of its job had left with it. One writer: `_ask_ray`."""


def watch(config: ProfileConfig) -> None:
    """This process read a configuration that lists functions, by itself: see to it that some step begins."""
    global _watched, _pid
    if _watched is None:
        import wrapt

        atexit.register(_at_exit)
        wrapt.register_post_import_hook(_ask_ray_before_it_ends, "ray")
    _watched, _pid = config, os.getpid()
    if os.environ.get(MAIN) == str(_pid):
        os.environ[MAIN] += _IS_PYTHON


def reached(config: ProfileConfig, step: int, selected: bool) -> None:
    """Remember that a step begins, captured or not."""
    global _steps, _selected
    _steps = (step if _steps is None else min(step, _steps[0]), step)
    _selected = _selected or selected
    if config.save_path in _reached:
        return
    _mark(config)
    from stepscope.recording.instrument import configured

    configured.note_absent()
    if _in_ray():  # its store may take its time, and this is where a step begins
        try:
            threading.Thread(target=_tell_ray, name="stepscope-reached", daemon=True).start()
        except RuntimeError as error:  # this process may have no more threads
            failures.note("telling Ray that a step began", error)


def _mark(config: ProfileConfig) -> None:
    """For the process of this host that speaks, which may be another one."""
    _reached.add(config.save_path)
    mark = RunLayout(config.save_path).reached(run.run_id())
    with suppress(OSError):  # nothing can be written there, and the captures will say so
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(mode=0o600)


def _tell_ray() -> None:
    try:
        store = _store_of_ray()
        if store is not None:
            store.internal_kv_put(_ray_key(), b"1", True, _NAMESPACE, timeout=_RAY_S)
    except Exception as error:
        failures.note("telling Ray that a step began", error)


def _ask_ray_before_it_ends(ray: object) -> None:
    # What is registered last is called first, and by now Ray has registered its end.
    atexit.register(_ask_ray)


def _ask_ray() -> None:
    global _asked
    try:
        if _watched is None or os.getpid() != _pid or not _speaks() or _watched.save_path in _reached:
            return
        store = _store_of_ray()
        if store is None:
            return
        if store.internal_kv_exists(_ray_key(), _NAMESPACE, timeout=_RAY_S):
            _mark(_watched)
        _asked = True
    except Exception as error:
        failures.note("asking Ray whether any step began", error)


def _store_of_ray() -> Any:
    """Ray's key-value store, which all processes of a cluster share (2.60); None where Ray does not run."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray.experimental import internal_kv

    return internal_kv.global_gcs_client


def _ray_key() -> bytes:
    import ray

    # Of the job: the run's id may be another one in each of its processes.
    return f"reached {ray.get_runtime_context().get_job_id()}".encode()


def _at_exit() -> None:
    try:
        if _watched is not None and os.getpid() == _pid:
            if _steps is not None:
                _say_unselected(_watched, *_steps)
            elif _speaks():
                _judge(_watched)
    except Exception as error:
        failures.note("looking whether any step began", error)


def _ended_by() -> str | None:
    """Return the exception that nothing caught, which the interpreter keeps; None after `sys.exit`."""
    error = getattr(sys, "last_value", None)
    return None if error is None else describe(error)


def _say_unselected(config: ProfileConfig, lowest: int, latest: int) -> None:
    """Steps began here, and the selected ones were not among them."""
    if _selected or not config.steps or os.environ.get("RANK", "0") != "0":
        return
    sys.stderr.write(
        f"stepscope: no step was captured: the program's steps were {lowest} to {latest}, and `steps` "
        f"selects {', '.join(map(str, config.steps))}\n"
    )


def _speaks() -> bool:
    """Whether it is this process that speaks for its run."""
    main = os.environ.get(MAIN)
    if main is not None and main.endswith(_IS_PYTHON):
        return main == f"{os.getpid()}{_IS_PYTHON}"
    return not _in_ray() and os.environ.get("RANK", "0") == "0"


def _in_ray() -> bool:
    """Whether this is a worker process of Ray's."""
    return os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"


def _judge(config: ProfileConfig) -> None:
    from socket import gethostname

    from stepscope.recording.instrument import configured

    layout, run_id = RunLayout(config.save_path), run.run_id()
    boundaries = configured.boundaries()
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
        unasked="ray" in sys.modules and not _asked,
        error=_ended_by(),
    )
    sys.stderr.write(f"stepscope: {record}\n")
    write_unreached(layout, record)
