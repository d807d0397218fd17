"""An engine's files from the disk of another host: where its actor writes and this process sees nothing.

They are copied and stay there as well: a shared disk that shows a new file late must not lose it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stepscope.engines.actor_call import ActorLine
from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact
from stepscope.files.temporary import temporary

_PIECE = 8 << 20
"""Bytes that travel at once."""


async def bring_home(line: ActorLine, step_dir: str, artifacts: Sequence[Artifact]) -> dict[str, str]:
    """Copies what is not here, with its sidecars, under the same paths.

    Returns:
        `{"artifacts on <host>": why}` for those that stay there alone; empty when all are here.
    """
    left: dict[str, str] = {}
    for artifact in artifacts:
        path = Path(step_dir, artifact.path)
        if await own_thread(path.exists):
            continue
        try:
            for name in await line.call(names_of, str(path)):
                if not Path(name).is_relative_to(step_dir) or ".." in Path(name).parts:
                    raise EngineError(f"{name} lies outside of the step's folder")
                await _copy(line, Path(name))
        except (EngineError, OSError) as error:
            left[f"artifacts on {artifact.host}"] = f"{path} is there and not here: {error}"
    return left


async def _copy(line: ActorLine, path: Path) -> None:
    part = temporary(path)
    await own_thread(_make_folder, path.parent)
    try:
        await own_thread(_append, part, b"")  # it may be empty
        offset = 0
        while piece := await line.call(read_piece, str(path), offset):
            await own_thread(_append, part, piece)
            offset += len(piece)
        await own_thread(os.replace, part, path)
    finally:
        await own_thread(part.unlink, True)


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def _append(path: Path, piece: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
        file.write(piece)


# In the actor's process.


def names_of(instance: object, path: str) -> list[str]:
    """The file, or all of a folder, and the sidecar at last: what has one is whole."""
    there = [found for found in Path(path).rglob("*") if found.is_file()] if os.path.isdir(path) else [path]
    return [str(name) for name in (*there, sidecar_of(Path(path)))]


def read_piece(instance: object, path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(_PIECE)
