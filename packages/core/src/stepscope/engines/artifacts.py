"""From a file that an engine wrote to an artifact: its record, with the sidecar beside it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from stepscope.engines.protocol import EngineCapture
from stepscope.errors import EngineError
from stepscope.files.atomic import write_atomic
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar

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
) -> Artifact:
    """The artifact for the complete file or folder at `path`, with its sidecar beside it. Blocks on the disk.

    Args:
        host: That of the process that was recorded; None: this one.

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
    )
    sidecar = Sidecar(
        step=capture.step,
        run_id=capture.run_id,
        artifact=artifact,
        process=None,  # whatever role it has is said where the host and the pid are the same
        opened=opened,
        closed=closed,
        versions=dict(versions or {}),
        options=dict(options or {}),
    )
    write_atomic(sidecar_of(path), msgspec.json.encode(sidecar))
    return artifact


def read_anchor() -> ClockAnchor:
    """This process' clocks at one moment."""
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
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        size = sum(each.stat().st_size for each in files)
    except OSError as error:
        raise EngineError(f"the engine announced {path}, which cannot be read: {error}") from error
    if size == 0:
        raise EngineError(f"the engine wrote an empty file: {path}")
    return size
