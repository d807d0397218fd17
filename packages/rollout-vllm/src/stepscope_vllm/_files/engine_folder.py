"""Folder that an engine writes to: its contents, and the moving of a capture's files out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from stepscope_vllm._engine_side.trace_writer import TEMPORARY
from stepscope_vllm._files.names import is_frontend, is_output, is_trace, stems_of


def listed(folder: Path | None) -> set[str]:
    """Return the names of all files of a profiler in a folder; none if the folder does not exist."""
    if folder is None:
        return set()
    try:
        return {name for name in os.listdir(folder) if is_output(name)}
    except OSError:
        return set()


def holder(root: Path, prefix: str) -> Path:
    """Return the folder that has files with this prefix: `root` or a folder in it. Return `root` if there are
    none.
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()]
    except OSError:
        return root
    holders = (folder for folder in folders if any(name.startswith(prefix) for name in listed(folder)))
    return next(holders, root)


def of_frontends(folder: Path) -> set[str]:
    """Return the names of the traces in which API servers and AsyncLLMs recorded themselves."""
    return {name for name in listed(folder) if is_trace(name) and is_frontend(name)}


def changed_ns(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the time at which each trace and its table were complete: unix ns, by the stem of their
    names.
    """
    changed: dict[str, int] = {}
    for name in names:
        with suppress(OSError):
            at_ns = (folder / name).stat().st_mtime_ns
            for stem in stems_of(name):
                changed[stem] = max(changed.get(stem, 0), at_ns)
    return changed


def whole_ns(changed: Mapping[str, int], name: str) -> int | None:
    """Return the time of one trace in `changed_ns`, also after `move` has renamed the trace."""
    (own,) = stems_of(name)
    return max((ns for stem, ns in changed.items() if own.endswith(stem)), default=None)


def move(names: Iterable[str], source: Path, target: Path, prefix: str) -> list[Path]:
    """Move files to a capture's folder, under names that no other capture has. Return their paths, sorted."""
    target.mkdir(parents=True, exist_ok=True)
    moved = []
    for name in sorted(names):
        own = name if name.startswith(prefix) else f"{prefix}_{name}"
        final = target / own
        try:
            os.rename(source / name, final)
        except OSError:  # another disk
            part = target / f"{TEMPORARY}{own}"
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, part)
            part.rename(final)
            remove(source / name)
        moved.append(final)
    return moved


def remove(path: Path) -> None:
    """Remove a trace, which may be a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
