"""Ways from here into the package stepscope-report, which a training worker need not have."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope_report import OpenRun, OpenStep, OpenTraces

ABSENT = "stepscope-report is not installed. Fix: pip install 'stepscope[cli]'"


def is_absent() -> bool:
    """Return whether stepscope-report is not installed here."""
    return find_spec("stepscope_report") is None


def open(  # noqa: A001  # read as `stepscope.open`
    path: str | os.PathLike[str], *, run: str | None = None, traces: bool = True
) -> OpenRun | OpenStep | OpenTraces:
    """Open the folder of a run (its save_path) or of one step in it: `stepscope_report.open`.

    Raises:
        ImportError: stepscope-report is not installed.
        RecordError: The folder holds neither a captured step nor a trace, or nothing of `run`.
    """
    if is_absent():
        raise ImportError(f"stepscope.open cannot read {os.fspath(path)}: {ABSENT}", name="stepscope_report")
    import stepscope_report

    return stepscope_report.open(path, run=run, traces=traces)
