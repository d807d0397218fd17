"""Transfer of an engine's files from the disk of another host, which this process does not see.

They are copied and stay there as well: a shared disk that shows a new file late must not lose it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from stepscope.engines.actor_call import ActorLine
from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact
from stepscope.files.storage.atomic import PIECE, Arrival

LEFT_BEHIND = "artifacts on "
"""Prefix of the key, among the ignored options, for files that stay on a host; the host's name follows."""


async def bring_home(line: ActorLine, step_dir: str, artifacts: Sequence[Artifact]) -> dict[str, str]:
    """Copy the files that are missing here, with their sidecars, to the same paths.

    Returns:
        `{"artifacts on <host>": reason}` for files that could not be copied; empty if all are here.
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
                await arrive(Path(name), partial(line.call, read_piece, name))
        except (EngineError, OSError) as error:
            left[f"{LEFT_BEHIND}{artifact.host}"] = f"{path} is there and not here: {error}"
    return left


async def arrive(path: Path, read: Callable[[int], Awaitable[bytes]]) -> None:
    """Receive a file and give it its name once it is complete.

    Args:
        read: Returns a piece of the file from an offset on, empty at the file's end.
    """
    arrival = await own_thread(Arrival, path)
    try:
        while piece := await read(arrival.bytes):
            await own_thread(arrival.add, piece)
        await own_thread(arrival.finish)
    except BaseException:
        await own_thread(arrival.give_up)
        raise


# In the actor's process.


def names_of(instance: object, path: str) -> list[str]:
    """Return the paths of a file, or of all files in a folder, with the sidecar last, because it marks a
    complete file.
    """
    files = [file for file in Path(path).rglob("*") if file.is_file()] if os.path.isdir(path) else [path]
    return [str(name) for name in (*files, sidecar_of(Path(path)))]


def read_piece(instance: object, path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)
