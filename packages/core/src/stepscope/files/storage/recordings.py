"""Files of profilers on the way to their final place: compression, and unused names."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from stepscope.files.layout import sidecar_of

_BLOCK = 8 << 20
"""Number of bytes of one compression call (6 ms). After each call, the GIL is taken from the training thread
for a moment."""


def compress(file: Path) -> Path:
    """Compress a file to `<name>.gz` beside it, and remove it. Return the new path.

    igzip releases the GIL: other threads go on.
    """
    from isal import igzip  # import time: 9 ms, spent in the thread that compresses

    compressed = file.with_name(file.name + ".gz")
    sink = igzip.open(compressed, "wb", compresslevel=1)  # type: ignore[no-untyped-call]  # isal
    with file.open("rb") as source, sink:
        shutil.copyfileobj(source, sink, _BLOCK)
    file.unlink()
    return compressed


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the path of `<stem><suffix>` in `folder`, with a number after the stem if the name is in use."""
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists() and not sidecar_of(path).exists())
