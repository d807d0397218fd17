"""A recorded run of the demo, packed: `stepscope report --sample` shows it where nothing was recorded yet."""

from __future__ import annotations

import zipfile
from pathlib import Path

from stepscope.errors import StepscopeError

ARCHIVE = Path(__file__).with_name("sample.zip")
"""Made by `tools/record_sample.py`."""


def unpack_sample(folder: Path) -> None:
    """Unpack the run into `folder`, which may hold it already.

    Raises:
        StepscopeError: `folder` holds something else.
        OSError: The folder cannot be written.
    """
    with zipfile.ZipFile(ARCHIVE) as archive:
        if not _is_free(folder, archive.read("run.json")):
            raise StepscopeError(
                f"{folder} holds something else than the sample. Fix: name an empty or a new folder"
            )
        archive.extractall(folder)


def _is_free(folder: Path, record: bytes) -> bool:
    """Return whether `folder` is absent, empty, or holds this run from an earlier time."""
    if not folder.exists():
        return True
    own = folder / "run.json"
    return folder.is_dir() and (own.read_bytes() == record if own.is_file() else not any(folder.iterdir()))
