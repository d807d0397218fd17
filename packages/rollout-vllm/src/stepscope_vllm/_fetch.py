"""Traces of workers on other hosts, where the engine's own process does not see what they wrote.

Through the engine's own calls: a worker with our extension hands over the files of its last capture, in
pieces. They stay there as well.
"""

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
"""`Driver.call`."""


async def bring_home(call: Call, folder: Path, said: Iterable[Mapping[str, Any] | None]) -> dict[str, str]:
    """Copies what is not here.

    Args:
        folder: Where the capture's files belong; what lies elsewhere is left alone.
        said: What each worker's `stepscope_release` returned.

    Returns:
        `{"worker on <host>": why}` for what stays there alone.
    """
    left: dict[str, str] = {}
    for worker in said:
        for name in (worker or {}).get("wrote", ()):
            if await asyncio.to_thread(os.path.exists, name):
                continue
            host = (worker or {})["host"]
            try:
                if Path(name).parent != folder:
                    raise EngineError(f"it is not in {folder}")
                await arrive(Path(name), partial(_piece, call, name))
            except (EngineError, OSError) as error:
                left[f"worker on {host}"] = f"{name} is there and not here: {error}"
    return left


async def _piece(call: Call, path: str, offset: int) -> bytes:
    said = await call("collective_rpc", "stepscope_read", args=(path, offset))
    found = [piece for piece in said if piece is not None]
    if not found:
        raise EngineError("no worker has it any more")
    return bytes(found[0])
