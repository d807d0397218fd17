"""A line at the end of a program in which no step began, or none of the selected ones.

A preset that does not fit, or a function that the loop never calls, would otherwise capture nothing and say
nothing. The process that `stepscope run` became speaks for the run. Without one, or if that is no Python
program, each process speaks that read the configuration by itself: rank 0 of several, and no Ray worker. The
first step of any process leaves a mark in the run's folder, which silences those that speak.
"""

from __future__ import annotations

import atexit
import os
import sys

from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files.layout import RunLayout
from stepscope.recording.instrument import configured
from stepscope.recording.process import failures, run
from stepscope.recording.process.identity import in_ray_worker

MAIN = "STEPSCOPE_RUN_PID"
"""Variable that `stepscope run` sets: the program's process id. A Python program adds `_IS_PYTHON` to it."""
_IS_PYTHON = " python"

_config: ProfileConfig | None = None
"""The configuration that is checked when this process ends. One writer: `watch`."""
_steps: list[int] = []
"""The lowest and the latest step that began in this process. One writer: `reached`."""
_selected = False
"""True if one of them was selected. One writer: `reached`."""


def watch(config: ProfileConfig) -> None:
    """Check at the end of this process, which read `config` by itself, that a step began."""
    global _config
    if _config is None:
        atexit.register(_at_exit, os.getpid())
    _config = config
    if os.environ.get(MAIN) == str(os.getpid()):
        os.environ[MAIN] += _IS_PYTHON


def reached(config: ProfileConfig, step: int, selected: bool) -> None:
    """Remember that a step begins, captured or not."""
    global _selected
    _selected = _selected or selected
    if not _steps:
        configured.note_absent()
        try:
            mark = RunLayout(config.save_path).reached(run.run_id())
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch(mode=0o600)
        except ours(OSError):  # a folder that cannot be written is reported by the captures
            pass
    _steps[:] = min([step, *_steps]), step


def _at_exit(pid: int) -> None:
    if _config is None or pid != os.getpid():  # a forked child says nothing
        return
    try:
        line = _about_selection(_config) if _steps else _about_boundaries(_config)
        if line is not None:
            sys.stderr.write(f"stepscope: {line}\n")
    except ours() as error:
        failures.note("checking whether a step began", error)


def _about_selection(config: ProfileConfig) -> str | None:
    if _selected or not config.steps or os.environ.get("RANK", "0") != "0":
        return None
    steps, selection = f"{_steps[0]} to {_steps[1]}", ", ".join(map(str, config.steps))
    return f"no step was captured: the program's steps were {steps}, and `steps` selects {selection}"


def _about_boundaries(config: ProfileConfig) -> str | None:
    boundaries = configured.boundaries()
    if not boundaries or not _speaks() or RunLayout(config.save_path).reached(run.run_id()).exists():
        return None
    if os.environ.get(MAIN) is None and not any("was patched" in fate for fate in boundaries):
        return None  # a process of another kind: it does not even import the framework
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        ended_by = failures.describe(error)
        return f"no step began, and none was captured: the program ended before, with {ended_by}"
    on_ray = " on this host (Ray workers of other hosts may have begun some)"
    where = on_ray if "ray" in sys.modules else ", and none was captured"
    return (
        f"no step began{where}: {'; '.join(boundaries)}. Fix: if the program failed, fix that first. Else "
        "list under `instrument` the preset of the framework, or a function that the loop calls once a step "
        "({module, name, step: around}); see docs/frameworks.md"
    )


def _speaks() -> bool:
    """Return whether this process speaks for its run."""
    main = os.environ.get(MAIN, "")
    if main.endswith(_IS_PYTHON):
        return main == f"{os.getpid()}{_IS_PYTHON}"
    return not in_ray_worker() and os.environ.get("RANK", "0") == "0"
