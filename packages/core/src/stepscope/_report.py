"""Check for the package stepscope-report, which a training worker need not have."""

from __future__ import annotations

from importlib.util import find_spec

ABSENT = "stepscope-report is not installed. Fix: pip install 'stepscope[cli]'"


def is_absent() -> bool:
    """Return whether stepscope-report is not installed here."""
    return find_spec("stepscope_report") is None
