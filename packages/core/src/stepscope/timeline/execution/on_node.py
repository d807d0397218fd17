"""Functions that a Ray node runs over its own files."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.storage.atomic import PIECE
from stepscope.timeline.execution.workers import idle_cores


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a node."""

    path: bytes
    """The system's bytes."""
    size_bytes: int
    mtime_ns: int


class NodeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a step on a node, and how many processes it can run."""

    version: str
    """Of stepscope."""
    idle_cores: int
    files: list[NodeFile]


def own_version() -> str:
    """Return the version of stepscope that runs."""
    return version("stepscope")


def list_files(step: bytes) -> NodeFiles:
    """List the files of a step's folder, `step` being its absolute path."""
    layout = StepLayout(os.fsdecode(step))
    folders = (layout.spans, layout.counters, layout.traces, layout.processes)
    files = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return NodeFiles(
        version=own_version(),
        idle_cores=idle_cores(),
        files=[_described(path) for path in files if path.is_file() and not path.name.startswith(".")],
    )


def read_piece(path: bytes, offset: int) -> bytes:
    """Return at most `PIECE` bytes of a file, from `offset` on."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)


def _described(path: Path) -> NodeFile:
    state = path.stat()
    return NodeFile(path=os.fsencode(path), size_bytes=state.st_size, mtime_ns=state.st_mtime_ns)
