"""Temporary names of files, and the removal of files that killed processes left behind.

A temporary name contains the machine and the process that writes there. So a clean-up spares the files of
living processes, and those of other machines and containers on the same file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from zlib import crc32

from stepscope.errors import ours
from stepscope.files.storage.processes import boot_id, is_running

_NAME = re.compile(r"^\..*\.(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}$", re.DOTALL)


def temporary(path: Path) -> Path:
    """Return a hidden name beside `path` that no other writer uses."""
    name = f".{path.name[:80]}.{_place() or '0' * 8}-{os.getpid()}-{os.urandom(6).hex()}"
    return path.parent / name  # `with_name` refuses `.`


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove the temporary files of dead processes of this machine in and below `folder`. Return their
    paths.
    """
    if _place() is None:
        return []
    return [path for path in _abandoned(folder) if _remove(path)]


def _abandoned(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            parts = _NAME.match(name)
            if parts and parts["place"] == _place() and not is_running(int(parts["pid"])):
                yield Path(parent, name)


def _remove(path: Path) -> bool:
    import shutil  # import time: 7 ms, and seldom needed

    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    return False


@cache
def _place() -> str | None:
    """Return eight hex digits for the scope of process ids: this boot and pid namespace, or None if
    unknown."""
    boot = boot_id()
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except ours(OSError):
        return None
    return None if boot is None else f"{crc32(f'{boot} {pids}'.encode()):08x}"
