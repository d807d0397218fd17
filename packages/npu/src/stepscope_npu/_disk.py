"""Files of a recording: the only reliable evidence of what torch_npu and CANN recorded.

<worker>_<pid>_<time>_ascend_pt/
    profiler_info[_RANK].json    written when the recording is stopped
    FRAMEWORK/                   operators, allocations and stacks of the host
    PROF_*/                      what CANN recorded of the device, and mstx ranges
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SUFFIX = "_ascend_pt"
"""The suffix by which torch_npu, MindStudio and msprof-analyze recognise a recording."""
_PLOG = "CANN's log (~/ascend/log, and ASCEND_SLOG_PRINT_TO_STDOUT=1) says why"


class Look(NamedTuple):
    """The state of one recording on disk."""

    folder: Path | None
    lacking: str | None
    """The missing part, with the reason, or None if nothing is missing."""
    failed: str | None
    """The reason why the folder is no recording at all, or None if it is one."""


def look(parent: Path, *, records_device: bool, errors: Sequence[str] = ()) -> Look:
    """Inspect the one recording in `parent`.

    Args:
        records_device: True if NPU data was requested.
        errors: Messages of errors in calls into C++, to be added to the reason.
    """
    messages = f" Its errors: {'; '.join(errors)}." if errors else ""
    folders = sorted(parent.glob(f"*{SUFFIX}"))
    if not folders:
        return Look(None, None, f"torch_npu made no folder.{messages or ' Its messages are on stdout'}")
    folder = folders[-1]
    device = any(path.is_dir() for path in folder.glob("PROF_*"))
    host = any(path.is_file() and path.stat().st_size for path in folder.glob("FRAMEWORK/*"))
    if not any(folder.glob("profiler_info*.json")):
        return Look(folder, None, f"torch_npu did not finish it: no profiler_info.json.{messages}")
    if not device and not host:
        return Look(folder, None, f"it is empty: neither PROF_* nor FRAMEWORK data.{messages} {_PLOG}")
    if records_device and not device:
        return Look(
            folder, f"no device data (no PROF_* folder): CANN recorded nothing.{messages} {_PLOG}", None
        )
    return Look(folder, f"torch_npu failed along the way.{messages}" if errors else None, None)


def make_folder(above: Path) -> Path:
    """Make a new folder below `above` for one recording.

    Raises:
        OSError: the folder cannot be made.
    """
    for _ in range(100):
        # The exporter may remove `above` with its last recording, at any moment.
        try:
            above.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=above))
        except FileNotFoundError:
            continue
        except FileExistsError:  # removed while `mkdir` looked at it, or it is a file
            if above.exists():
                raise
    raise FileNotFoundError(f"{above} is removed again and again")


def place(folder: Path, target: Path) -> None:
    """Move a recording to `target`, and remove the folder in which it was made."""
    shutil.move(folder, target)
    remove(folder.parent)


def remove(parent: Path) -> None:
    """Remove the folder in which one recording was made, and the two folders above it if they are empty."""
    shutil.rmtree(parent, ignore_errors=True)
    for above in (parent.parent, parent.parent.parent):
        try:
            above.rmdir()
        except OSError:
            return


def cann_version(folder: Path) -> str | None:
    """Return the version of CANN that `profiler_info*.json` names, or None if the file names no version."""
    for path in folder.glob("profiler_info*.json"):
        try:
            info = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        version = info.get("cann_version")
        return None if not version or version == "not known" else str(version)
    return None
