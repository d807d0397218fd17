"""Writer of a worker's traces, which have a temporary name until they are complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEMPORARY = ".part-"
"""Prefix of a file's name until the file is complete."""


def probe(folder: Path) -> None:
    """Make the folder and write a file in it, as a check. Without the check, vLLM would report success even
    if the trace cannot be written.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f"{TEMPORARY}{os.getpid()}-{time.monotonic_ns()}"
    probe.touch()
    probe.unlink()


def drop(profile: object) -> None:
    """Discard a profile. This is the handler of a worker whose rank is not wanted."""


def writer(folder: Path, stem: str, wrote: list[str], *, gzip: bool) -> Callable[[Any], None]:
    """Return a handler that writes traces to a folder.

    Args:
        stem: Prefix of the file names.
        wrote: List to which the handler appends the path of each trace.
    """
    suffix = ".pt.trace.json"

    def write(profile: Any) -> None:
        name = f"{stem}.{time.time_ns()}{suffix}"
        plain = folder / f"{TEMPORARY}{name}"
        try:
            profile.export_chrome_trace(str(plain))
            if gzip:
                part = _compress(plain, folder / f"{TEMPORARY}{name}.gz")
                wrote.append(str(part.rename(folder / f"{name}.gz")))
            else:
                wrote.append(str(plain.rename(folder / name)))
        finally:
            plain.unlink(missing_ok=True)

    return write


def _compress(plain: Path, target: Path) -> Path:
    from isal import igzip  # torch's own gzip takes 80 times the CPU, while generation waits

    with plain.open("rb") as source, igzip.open(target, "wb", compresslevel=1) as sink:  # type: ignore[no-untyped-call]
        shutil.copyfileobj(source, sink, 1 << 20)
    return target
