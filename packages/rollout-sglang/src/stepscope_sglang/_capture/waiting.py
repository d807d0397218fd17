"""Waiting for the files of a recording, whose writers answer before the last byte is on the disk."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from stepscope_sglang._files.capture_folder import CaptureFolder, File

_LOOK_S = 0.05


def are_complete(folder: CaptureFolder, files: Sequence[File]) -> bool:
    """Return whether there are files, and their traces are complete."""
    return bool(files) and folder.traces_are_complete(files)


def are_of_all_ranks(folder: CaptureFolder, files: Sequence[File], pp: int) -> bool:
    """Return whether all pipeline ranks wrote the files that one of them wrote."""
    names = [file.name for file in files if file.is_trace]
    ranks = Counter((name.topology.get("tp"), name.topology.get("dp"), name.stage) for name in names)
    return all(count >= pp for count in ranks.values()) and folder.traces_are_complete(files)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    never = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        never.wait(_LOOK_S)
    return True
