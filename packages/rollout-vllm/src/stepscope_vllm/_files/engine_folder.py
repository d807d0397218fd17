"""Names of the files that vLLM's profilers write."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from stepscope_vllm._engine_side.trace_writer import TEMPORARY

_TRACE = re.compile(r"\.pt\.trace\.json(?:\.gz)?$")

_TABLE = re.compile(r"(?:\.profiler_out\.txt|profiler_out_\d+\.txt)$")

_RANK = re.compile(r"(?:^|[_.-])rank[-_]?(\d+)(?=[._])")

_DP = re.compile(r"(?:^|_)dp(\d+)(?=_)")

_RECORDING = re.compile(r"_(\d+)_\d+_ascend_pt$")
"""Name of the folder of a vllm-ascend recording. The group is the pid."""

_FRONTEND = ".async_llm."

_PREFIX = 100
"""Largest length of a prefix. vLLM appends host, pid, rank and time, and a file name has at most 255
characters."""


def prefix_of(name: str) -> str:
    """Return a capture's name as a prefix that vLLM accepts: 1 to 128 characters of `A-Za-z0-9._-`, beginning
    with a letter or a digit.

    If the name has to be changed, the prefix ends with a digest of the whole name, so that no two captures
    share a prefix.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    cleaned = cleaned if cleaned[:1].isalnum() else f"c{cleaned}"
    if cleaned == name and len(name) <= _PREFIX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{cleaned[: _PREFIX - len(digest) - 1]}-{digest}"


def rank_of(name: str) -> int | None:
    return _number(_RANK.search(name))


def dp_of(name: str) -> int | None:
    """Return the number of the data-parallel engine in a file's name, or None if the name has none."""
    return _number(_DP.search(name))


def pid_of(name: str) -> int | None:
    """Return the pid in the name of a recording of the Ascend profiler; None for other names."""
    return _number(_RECORDING.search(name))


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(match[1])


def is_output(name: str) -> bool:
    """Return whether `name` is the final name of a file that a profiler wrote."""
    return not name.startswith(TEMPORARY) and bool(is_trace(name) or _TABLE.search(name))


def is_trace(name: str) -> bool:
    """Return whether a file is a trace of torch, or a recording of the Ascend profiler."""
    return bool(_TRACE.search(name)) or is_recording(name)


def is_frontend(name: str) -> bool:
    """Return whether `name` is a trace in which an API server or an AsyncLLM recorded itself."""
    return _FRONTEND in name


def is_recording(name: str) -> bool:
    """Return whether `name` is a folder of the Ascend profiler.

    The folder names of all captures of one worker begin with the name of the first capture.
    """
    return bool(_RECORDING.search(name))


def stems_of(name: str) -> tuple[str, ...]:
    """Return the parts of a file's name by which a trace and its table of operators are matched: a single
    part, or two parts for a table of operators of vLLM up to 0.30.
    """
    if table := re.fullmatch(r"profiler_out_(\d+)\.txt", name):  # up to 0.30
        return f"rank-{table[1]}", f"rank{table[1]}"
    return (re.sub(r"(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?$|\.profiler_out\.txt$", "", name),)


def listed(folder: Path | None) -> set[str]:
    """Return the names of all files of a profiler in a folder; empty if the folder does not exist."""
    if folder is None:
        return set()
    try:
        return {name for name in os.listdir(folder) if is_output(name)}
    except OSError:
        return set()


def holder(root: Path, prefix: str) -> Path:
    """Return the folder in `root` that contains files with this prefix; `root` if no folder does."""
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
    """Return {stem of the names: unix ns at which a trace and its table of operators were complete}."""
    changed: dict[str, int] = {}
    for name in names:
        with suppress(OSError):
            at_ns = (folder / name).stat().st_mtime_ns
            for stem in stems_of(name):
                changed[stem] = max(changed.get(stem, 0), at_ns)
    return changed


def whole_ns(changed: Mapping[str, int], name: str) -> int | None:
    """Return the time of one trace in the result of `changed_ns`, even if `move` has renamed the trace. None
    if the result has no such trace.
    """
    (own,) = stems_of(name)
    return max((ns for stem, ns in changed.items() if own.endswith(stem)), default=None)


def move(names: Iterable[str], source: Path, target: Path, prefix: str) -> list[Path]:
    """Move files to a capture's folder, and add the capture's prefix to names without this prefix.

    Return the new paths, sorted.
    """
    target.mkdir(parents=True, exist_ok=True)
    moved = []
    for name in sorted(names):
        own = name if name.startswith(prefix) else f"{prefix}_{name}"
        final = target / own
        try:
            os.rename(source / name, final)
        except OSError:  # `target` is on another disk
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
