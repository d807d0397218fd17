"""What a recording left on disk: the only place where torch_npu and CANN tell the truth about it.

<worker>_<pid>_<time>_ascend_pt/
    profiler_info[_RANK].json    written when the recording is stopped
    FRAMEWORK/                   operators, allocations and stacks of the host
    PROF_*/                      what CANN recorded of the device, and mstx ranges
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SUFFIX = "_ascend_pt"
"""What torch_npu, MindStudio and msprof-analyze know such a folder by."""
_PLOG = "CANN's log (~/ascend/log, and ASCEND_SLOG_PRINT_TO_STDOUT=1) says why"


class Look(NamedTuple):
    """One recording as it lies there."""

    folder: Path | None
    lacking: str | None
    """What is not in it, and why."""
    failed: str | None
    """Why it is no recording at all."""


def look(parent: Path, *, records_device: bool, errors: Sequence[str] = ()) -> Look:
    """Looks at the one recording in `parent`.

    Args:
        records_device: NPU data was asked for.
        errors: What the calls into C++ raised.
    """
    said = f" It said: {'; '.join(errors)}." if errors else ""
    folders = sorted(parent.glob(f"*{SUFFIX}"))
    if not folders:
        return Look(None, None, f"torch_npu made no folder.{said or ' Its messages are on stdout'}")
    folder = folders[-1]
    device = any(path.is_dir() for path in folder.glob("PROF_*"))
    host = any(path.is_file() and path.stat().st_size for path in folder.glob("FRAMEWORK/*"))
    if not any(folder.glob("profiler_info*.json")):
        return Look(folder, None, f"torch_npu did not finish it: no profiler_info.json.{said}")
    if not device and not host:
        return Look(folder, None, f"it is empty: neither PROF_* nor FRAMEWORK data.{said} {_PLOG}")
    if records_device and not device:
        return Look(folder, f"no device data (no PROF_* folder): CANN recorded nothing.{said} {_PLOG}", None)
    return Look(folder, f"torch_npu failed along the way.{said}" if errors else None, None)


def make_folder(above: Path) -> Path:
    """A new folder below `above` for one recording.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(100):
        above.mkdir(parents=True, exist_ok=True)
        try:
            return Path(tempfile.mkdtemp(dir=above))
        except FileNotFoundError:  # the exporter has just moved the last recording out, and removed it
            continue
    raise FileNotFoundError(f"{above} is removed again and again")


def place(folder: Path, target: Path) -> None:
    """Moves a recording to where it shall lie, and removes the folder it was made in."""
    try:
        os.rename(folder, target)
    except OSError:  # another file system
        shutil.move(folder, target)
    remove(folder.parent)


def remove(parent: Path) -> None:
    """Removes the folder that one recording was made in, and those above it that are empty now."""
    shutil.rmtree(parent, ignore_errors=True)
    for above in (parent.parent, parent.parent.parent):
        try:
            above.rmdir()
        except OSError:
            return


def cann_version(folder: Path) -> str | None:
    """As the recording says; None when it does not."""
    for path in folder.glob("profiler_info*.json"):
        try:
            info = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        found = info.get("cann_version")
        return None if not found or found == "not known" else str(found)
    return None
