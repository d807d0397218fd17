"""Code that Python runs first in every process that `stepscope run` starts, and in its child processes.

This folder is first on PYTHONPATH in these processes. The code reads the `instrument` list of the
configuration, so that a framework is patched when it is imported. An error here must not prevent a program
from starting.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_the_one_behind() -> None:
    """Run the next `sitecustomize` on the path, which this module hides: the distribution's, or another
    tool's.
    """
    here = Path(__file__).resolve().parent
    behind = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _take_the_configuration() -> None:
    try:
        from stepscope._recording.capture import configure
    except ImportError as error:  # this Python is not in the environment of `stepscope run`
        _say(f"is not installed in {sys.prefix} ({error})")
        return
    try:
        configure.start_up()
    except Exception as error:
        _say(str(error))


def _say(why: str) -> None:
    sys.stderr.write(f"stepscope: this process is not instrumented: {why}\n")


if __name__ == "sitecustomize":
    _run_the_one_behind()
    _take_the_configuration()
