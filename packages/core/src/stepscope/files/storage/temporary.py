"""Names of what is being written, and the removal of what a process that was killed left half-written.

A temporary name says which process of which machine writes there, so that nobody takes another's work for
rubbish: neither that of a living process nor that of another machine or container on the same file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from zlib import crc32

from stepscope.files.storage.processes import boot_id, is_running

_NAME = re.compile(r"^\..*\.(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-[0-9a-f]{12}$", re.DOTALL)


def temporary(path: Path) -> Path:
    """A hidden name beside `path` that nobody else uses."""
    name = f".{path.name[:80]}.{_place() or '0' * 8}-{os.getpid()}-{os.urandom(6).hex()}"
    return path.parent / name  # `with_name` refuses `.`


def remove_abandoned(folder: Path) -> list[Path]:
    """Removes what processes of this machine, dead by now, were writing in `folder` and below it."""
    if _place() is None:
        return []
    return [path for path in _abandoned(folder) if _remove(path)]


def _abandoned(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            found = _NAME.match(name)
            if found and found["place"] == _place() and not is_running(int(found["pid"])):
                yield Path(parent, name)


def _remove(path: Path) -> bool:
    import shutil  # 7 ms, and seldom needed

    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    return False


@cache
def _place() -> str | None:
    """Eight hex digits for where process ids mean the same: this boot, this pid namespace. None: unknown."""
    boot = boot_id()
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return None if boot is None else f"{crc32(f'{boot} {pids}'.encode()):08x}"
