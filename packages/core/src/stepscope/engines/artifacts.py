"""Artifact records of the files that an engine wrote, and a sidecar beside each file."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from stepscope.engines.protocol import EngineCapture
from stepscope.errors import EngineError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Ended, Sidecar, Stall
from stepscope.files.storage import write_atomic

_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_BEGAN = re.compile(rb'"name":\s*"Iteration Start: PyTorch Profiler"[^{}]*?"ts":\s*([\d.]+)')
_ENDED = re.compile(rb'"name":\s*"Record Window End"[^{}]*?"ts":\s*([\d.]+)')
_SLACK_NS = 50_000_000
"""Largest distance in ns between a stall and the start or end of its recording. The two are timed by clocks
that differ slightly."""
Option: TypeAlias = str | int | float | bool | None


def publish(
    path: Path,
    capture: EngineCapture,
    *,
    kind: str,
    tool: str,
    stage: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    topology: Mapping[str, int] | None = None,
    pid: int | None = None,
    host: str | None = None,
    truncated: str | None = None,
    ignored: Mapping[str, str] | None = None,
    opened: ClockAnchor | None = None,
    closed: ClockAnchor | None = None,
    versions: Mapping[str, str] | None = None,
    options: Mapping[str, Option] | None = None,
    stalls: Sequence[Stall] = (),
    iterations: int | None = None,
    iterations_asked: int | None = None,
    ended: Ended | None = None,
    note: str | None = None,
) -> Artifact:
    """Return the artifact for the complete file or folder at `path`, with its sidecar beside it. Blocks on
    the disk.

    Args:
        kind: Name of the format, such as `torch_trace`, which determines the reader of the file.
        tool: The profiler that wrote the file.
        stage: The recorded stage, or None for the whole capture.
        rank: Global rank of the recorded process; None if unknown or if the file has several ranks.
        topology: Position of the process in each kind of parallelism, such as {"tp": 1}.
        pid: Process id of the recorded process, or None if unknown.
        host: Host of the recorded process, or None for this host.
        truncated: Reason why the recording ended early, or None.
        ignored: {option: reason} for options of the capture without effect on this file.
        opened: Clocks of the recorded process when the recording began, or None.
        closed: Clocks of the recorded process when the recording ended, or None.
        versions: Versions of the libraries that a reader needs to know.
        options: Options that the profiler ran with.
        stalls: Times in which the profiler stopped the engine.
        iterations: Number of recorded forward passes, or None if unknown.
        iterations_asked: Number of forward passes that the capture asked for, or None for no limit.
        ended: Cause of the recording's end, or None if unknown.
        note: A remark for people, or None.

    Raises:
        EngineError: the file is absent, empty, or outside the capture's step folder.
        OSError: the sidecar cannot be written.
    """
    artifact = Artifact(
        path=_inside(path, Path(capture.step_dir)),
        kind=kind,
        tool=tool,
        role="rollout",
        stage=stage,
        rank=rank,
        world_size=world_size,
        replica=capture.replica,
        topology=None if topology is None else dict(topology),
        host=host or socket.gethostname(),
        pid=pid,
        size_bytes=_size(path),
        truncated=truncated,
        ignored=dict(ignored or {}),
        stalls=tuple(stalls),
        iterations=iterations,
        iterations_asked=iterations_asked,
        ended=ended,
        note=note,
    )
    sidecar = Sidecar(
        step=capture.step,
        run_id=capture.run_id,
        artifact=artifact,
        process=None,  # readers find the process's role by its host and pid
        opened=opened,
        closed=closed,
        versions=dict(versions or {}),
        options=dict(options or {}),
    )
    write_atomic(sidecar_of(path), msgspec.json.encode(sidecar))
    return artifact


def recorded_window(head: bytes, tail: bytes) -> tuple[int, int] | None:
    """Return the times at which torch began and ended the recording of a trace, in unix ns of the recorded
    host. None if the trace does not state the times.

    Args:
        head: The beginning of the trace, at least up to its first event.
        tail: The last few KB of the trace, where torch writes the begin and end of the recording.
    """
    base = _BASE.search(head)
    began, ended = (mark.search(tail) for mark in (_BEGAN, _ENDED))
    if base is None or began is None or ended is None:
        return None
    start_ns, end_ns = (int(base[1]) + round(float(mark[1]) * 1000) for mark in (began, ended))
    return (start_ns, end_ns) if start_ns <= end_ns else None


def stalls_of(
    window: tuple[int, int] | None, stamped: Sequence[Stall] = (), whole_ns: int | None = None
) -> tuple[Stall, ...]:
    """Return the stalls of an engine that belong to one trace.

    Args:
        window: Result of `recorded_window` for the trace.
        stamped: Stalls that stepscope's code in the engine's process timed, for this and other traces.
        whole_ns: Time at which the last file of the trace was complete, in unix ns of the same host.
    """
    if window is None:
        return ()
    edges = {"starting": window[0], "writing": window[1]}
    nearest = [
        min((_distance_ns(stall, edge_ns), at) for at, stall in enumerate(stamped) if stall.doing == doing)
        for doing, edge_ns in edges.items()
        if any(stall.doing == doing for stall in stamped)
    ]
    stalls = [stamped[at] for distance_ns, at in nearest if distance_ns <= _SLACK_NS]
    if whole_ns is not None and whole_ns > window[1] and all(stall.doing != "writing" for stall in stalls):
        stalls.append(Stall(start_ns=window[1], end_ns=whole_ns, doing="writing", source="file"))
    return tuple(stalls)


def _distance_ns(stall: Stall, at_ns: int) -> int:
    return max(stall.start_ns - at_ns, at_ns - stall.end_ns, 0)


def read_anchor() -> ClockAnchor:
    """Read all clocks of this process at one moment."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    return ClockAnchor(wall_ns=wall, mono_ns=(before + after) // 2, uncertainty_ns=(after - before + 1) // 2)


def _inside(path: Path, step_dir: Path) -> str:
    try:
        return str(path.resolve().relative_to(step_dir.resolve()))
    except ValueError:
        raise EngineError(
            f"the engine wrote {path}, which is not inside {step_dir}. "
            "Fix: let the engine write below EngineCapture.out_dir"
        ) from None


def _size(path: Path) -> int:
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise EngineError(f"the engine announced {path}, which cannot be read: {error}") from error
    if size == 0:
        raise EngineError(f"the engine wrote an empty file: {path}")
    return size
