"""Whole files or none: everything in the output tree is written under a temporary name and renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from stepscope.files.storage.temporary import temporary

private = partial(os.open, mode=0o600)
"""As the `opener` of a new file: nobody else reads it."""


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, replacing what is there: readers see the old file or the new one, whole.

    The folder is created. The file's mode is 0600 (what a trace holds is the user's own).

    Raises:
        OSError: the disk or the folder does not let us; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = temporary(path)
    try:  # a Ctrl-C may come as soon as the file is there
        with open(name, "xb", opener=private) as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):  # its folder may be gone: the error that matters is the first
            name.unlink()
        raise
