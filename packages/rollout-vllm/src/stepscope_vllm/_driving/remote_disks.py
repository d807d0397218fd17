"""Copies of traces from disks of other hosts, which this process does not see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.engines.fetch import arrive
from stepscope.errors import EngineError

Call = Callable[..., Awaitable[Any]]
"""`EngineCalls.call`."""


async def bring_home(call: Call, folder: Path, reports: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Copy the traces that workers of other hosts wrote to disks that this process does not see.

    A worker with our extension returns the files of its last capture in pieces, through the engine's own
    calls. It keeps its copies.

    Args:
        folder: The capture's folder; files of other folders are not copied.
        reports: The answers of the workers' `stepscope_release`.

    Returns:
        `{"worker on <host>": reason}` for files that could not be copied.
    """
    absent: dict[str, str] = {}
    for worker in reports:
        for name in worker.get("wrote", ()):
            if await asyncio.to_thread(os.path.exists, name):
                continue
            host = worker["host"]
            try:
                if Path(name).parent != folder:
                    raise EngineError(f"it is not in {folder}")
                await arrive(Path(name), partial(_piece, call, name))
            except (EngineError, OSError) as error:
                absent[f"worker on {host}"] = f"{name} was not copied from there: {error}"
    return absent


async def _piece(call: Call, path: str, offset: int) -> bytes:
    answers = await call("collective_rpc", "stepscope_read", args=(path, offset))
    pieces = [piece for piece in answers if piece is not None]
    if not pieces:
        raise EngineError("no worker has it any more")
    return bytes(pieces[0])
