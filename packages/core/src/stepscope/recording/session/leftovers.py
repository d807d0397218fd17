"""Unfinished files of killed processes."""

from __future__ import annotations

from pathlib import Path

from stepscope.files.layout import StepLayout
from stepscope.files.storage.temporary import remove_abandoned

_tidied: dict[str, StepLayout] = {}
"""Output folder -> the step captured last. One writer: `tidy`."""


def tidy(save_path: str, step: StepLayout) -> None:
    """Remove unfinished files of killed processes: once in the whole folder, then in the last step."""
    last = _tidied.get(save_path)
    remove_abandoned(Path(save_path) if last is None else last.root)
    _tidied[save_path] = step
