"""A message at the end of an unedited program in which no step was captured.

Without the message, a run with a wrong preset, or with a listed function that is never called, would silently
capture nothing. The process that `stepscope run` started logs the message. Without `stepscope run`, or if
`stepscope run` did not start a Python program, each process that has read the configuration logs the message.
Of several ranks, only rank 0 logs the message; Ray workers log none. Each process records in a file of the
run's folder whether a step began, was captured, or failed. The logging process reads this file.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping

from stepscope._recording.instrument import configured
from stepscope._recording.process import failures, identity
from stepscope._recording.process.identity import in_ray_worker
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files import layout
from stepscope.files.layout import RunLayout
from stepscope.files.storage import private

MAIN = "STEPSCOPE_RUN_PID"
"""Environment variable in which `stepscope run` states the program's process id. A Python program appends
`_IS_PYTHON`."""
_IS_PYTHON = " python"

_config: ProfileConfig | None = None
"""The configuration for the check at exit, or None. One writer: `watch`."""
_steps: list[int] = []
"""[lowest step, last step] that began in this process; empty at first. One writer: `reached`."""
_count = 0
"""Number of steps that began in this process. One writer: `reached`."""
_added: set[str] = set()
"""First words of the lines that this process has added to `RunLayout.reached`. One writer: `_add`."""


def watch(config: ProfileConfig) -> None:
    """At exit of this process, check that a step has begun. Called in a process that has read the
    configuration.
    """
    global _config
    if _config is None:
        atexit.register(_at_exit, os.getpid())
    _config = config
    if os.environ.get(MAIN) == str(os.getpid()):
        os.environ[MAIN] += _IS_PYTHON


def reached(config: ProfileConfig, step: int) -> None:
    """Record that a step begins, captured or not. At the second step, log functions that were not called."""
    global _count
    _count += 1
    if _count == 1:
        configured.note_absent()
        _add(config, layout.BEGAN, str(step))
    elif _count == 2:
        configured.note_unreached()
    _steps[:] = min([step, *_steps]), step


def captured(config: ProfileConfig) -> None:
    """Record that a step is being captured."""
    _add(config, layout.CAPTURED, "")


def failed(error: BaseException, config: ProfileConfig | None = None) -> None:
    """Record why a selected step could not be captured. Only the first error of a process is recorded."""
    if config is not None or _config is not None:
        _add(config or _config, layout.FAILED, failures.describe(error))


def _add(config: ProfileConfig | None, word: str, text: str) -> None:
    if word in _added or config is None:
        return
    _added.add(word)
    try:
        mark = RunLayout(config.save_path).reached(identity.run_id())
        mark.parent.mkdir(parents=True, exist_ok=True)
        with open(mark, "a", encoding="utf-8", opener=private) as file:
            file.write(" ".join([word, *text.split()]) + "\n")
    except ours(OSError):  # captures report a folder that cannot be written
        pass


def _at_exit(pid: int) -> None:
    if _config is None or pid != os.getpid() or not _speaks():  # not in a forked child
        return
    try:
        outcome = RunLayout(_config.save_path).outcome(identity.run_id())
        line = _about_captures(_config, outcome) if outcome else _about_boundaries()
        if line is not None:
            sys.stderr.write(f"stepscope: {line}\n")
    except ours() as error:
        failures.note("checking whether a step began", error)


def _about_captures(config: ProfileConfig, outcome: Mapping[str, str]) -> str | None:
    """Return the message if steps began but none was captured, else None."""
    is_main = os.environ.get(MAIN, "").endswith(_IS_PYTHON)
    if not config.steps or layout.CAPTURED in outcome or not (_steps or is_main):
        return None
    if layout.FAILED in outcome:
        return f"no step was captured: {outcome[layout.FAILED]}"
    steps = f"were {_steps[0]} to {_steps[1]}" if _steps else f"began with {outcome[layout.BEGAN]}"
    selection = ", ".join(map(str, config.steps))
    ended_by = _ended_by()
    return f"no step was captured: the program's steps {steps}, and `steps` selects {selection}. " + (
        f"The program ended with {ended_by}" if ended_by else "Fix: select steps that it has (--steps)"
    )


def _about_boundaries() -> str | None:
    boundaries = configured.boundaries()
    if not boundaries or _steps:
        return None
    if os.environ.get(MAIN) is None and not any("was patched" in fate for fate in boundaries):
        return None  # this process does not import the framework, but another one may
    ended_by = _ended_by()
    if ended_by is not None:
        return f"no step began, and none was captured: the program ended before, with {ended_by}"
    on_ray = " on this host (Ray workers of other hosts may have begun some)"
    where = on_ray if "ray" in sys.modules else ", and none was captured"
    return (
        f"no step began{where}: {'; '.join(boundaries)}. Fix: if the program failed, fix that first. Else "
        "list under `instrument` the preset of the framework, or a function that the loop calls once a step "
        "({module, name, step: around}); see docs/frameworks.md"
    )


def _ended_by() -> str | None:
    """Return the exception that ended the program, as text, or None."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if error is None else failures.describe(error)


def _speaks() -> bool:
    """Return whether this process logs the message for its run."""
    main = os.environ.get(MAIN, "")
    if main.endswith(_IS_PYTHON):
        return main == f"{os.getpid()}{_IS_PYTHON}"
    return not in_ray_worker() and os.environ.get("RANK", "0") == "0"
