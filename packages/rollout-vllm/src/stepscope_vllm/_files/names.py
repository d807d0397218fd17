"""Names of the files that vLLM's profilers write."""

from __future__ import annotations

import hashlib
import re

from stepscope_vllm._engine_side.trace_writer import TEMPORARY

_TRACE = re.compile(r"\.pt\.trace\.json(?:\.gz)?$")

_TABLE = re.compile(r"(?:\.profiler_out\.txt|profiler_out_\d+\.txt)$")

_RANK = re.compile(r"(?:^|[_.-])rank[-_]?(\d+)(?=[._])")

_DP = re.compile(r"(?:^|_)dp(\d+)(?=_)")

_RECORDING = re.compile(r"_(\d+)_\d+_ascend_pt$")
"""Name of a recording of vllm-ascend, which is a folder. The group is the pid."""

_FRONTEND = ".async_llm."

_PREFIX = 100
"""Largest length of a prefix: vLLM appends host, pid, rank and time, and a file's name has at most 255
characters."""


def prefix_of(name: str) -> str:
    """Return a capture's name as vLLM takes it: 1 to 128 of `A-Za-z0-9._-`, the first a letter or a digit.

    A name that has to be changed gets a digest of the whole name at its end, so that no two captures share a
    prefix.
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
    """Return the number of the data-parallel engine in a file's name, or None if it has none."""
    return _number(_DP.search(name))


def pid_of(name: str) -> int | None:
    """Return the pid in the name of a recording of the Ascend profiler; None for other names."""
    return _number(_RECORDING.search(name))


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(match[1])


def is_output(name: str) -> bool:
    """Return whether a profiler wrote the file, under its final name."""
    return not name.startswith(TEMPORARY) and bool(is_trace(name) or _TABLE.search(name))


def is_trace(name: str) -> bool:
    """Return whether a file is a trace of torch, or a recording of the Ascend profiler."""
    return bool(_TRACE.search(name)) or is_recording(name)


def is_frontend(name: str) -> bool:
    """Return whether a trace is one in which an API server or an AsyncLLM recorded itself."""
    return _FRONTEND in name


def is_recording(name: str) -> bool:
    """Return whether `name` is a folder of the Ascend profiler.

    All folders of one worker begin with the name of its first capture.
    """
    return bool(_RECORDING.search(name))


def stems_of(name: str) -> tuple[str, ...]:
    """Return the parts that the names of a trace and of its table have in common."""
    if table := re.fullmatch(r"profiler_out_(\d+)\.txt", name):  # up to 0.30
        return f"rank-{table[1]}", f"rank{table[1]}"
    return (re.sub(r"(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?$|\.profiler_out\.txt$", "", name),)
