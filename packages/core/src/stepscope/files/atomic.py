"""Whole files or none: everything in the output tree is written under a temporary name and renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, replacing what is there. Readers see the old file or the new one, never a
    part.

    The folder is created. The file's mode is 0600 (what a trace holds is the user's own).

    Raises:
        OSError: the disk or the folder does not let us; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
