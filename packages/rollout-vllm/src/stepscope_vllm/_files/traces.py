"""The files of one capture: told apart from all others, complete, with the ranks that they state."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engines.artifacts import recorded_window
from stepscope.engines.fetch import arrive
from stepscope.errors import EngineError
from stepscope_vllm._engine_side.extension import TEMPORARY

_TRACE = re.compile(r"\.pt\.trace\.json(?:\.gz)?$")
_TABLE = re.compile(r"(?:\.profiler_out\.txt|profiler_out_\d+\.txt)$")
_RANK = re.compile(r"(?:^|[_.-])rank[-_]?(\d+)(?=[._])")
_DP = re.compile(r"(?:^|_)dp(\d+)(?=_)")
_RECORDING = re.compile(r"_(\d+)_\d+_ascend_pt$")
"""Name of a recording of vllm-ascend: a folder, and the pid in its name."""
_STATED = re.compile(rb'"distributedInfo":\s*\{[^{}\[\]]*?"rank":\s*(\d+)[^{}\[\]]*?"world_size":\s*(\d+)')
_HOST = re.compile(rb'"host_name":\s*"([^"\\]{1,255})"')
_PID = re.compile(rb'"pid":\s*(\d+)')
_TITLE = re.compile(r"(?:^|_)DP(\d+)(?:_|$)")
_FRONTEND = ".async_llm."
_CAPTURE = re.compile(r"step_(\d{6,})_")
"""Beginning of a capture's name, and so of its files."""
_PREFIX = 100
"""Characters of a prefix: vLLM puts host, pid, rank and time behind it, and a file's name has 255."""
_HEAD = 1 << 16
"""Bytes of a trace in which everything but its events stands."""
_TAIL = 1 << 12
"""Bytes behind the events, in which torch writes when it began and ended to record."""
_ITERATION = b'"name": "execute_'
_WAIT_S = 10.0
"""For a file that is still growing although its worker has answered (a slow shared disk)."""

Call = Callable[..., Awaitable[Any]]
"""`Driver.call`."""


class Trace(NamedTuple):
    """Facts that one file states about itself."""

    path: Path
    frontend: bool
    rank: int | None
    """In the torch.distributed world of its worker."""
    world_size: int | None
    """Of that world."""
    dp: int | None
    """Number of the replica's data-parallel engine that wrote it."""
    pid: int | None
    host: str | None
    """Host on which it was recorded, which may not be where it is published."""
    window: tuple[int, int] | None = None
    """Start and end of torch's recording: unix ns of that host."""
    iterations: int = 0
    """Engine iterations that it names."""

    @property
    def is_recording(self) -> bool:
        """Return whether it is a recording of the Ascend profiler."""
        return is_recording(self.path.name)


def listed(folder: Path | None) -> set[str]:
    """Return names of all files there that a profiler wrote; empty where there is no folder."""
    if folder is None:
        return set()
    try:
        return {name for name in os.listdir(folder) if is_output(name)}
    except OSError:
        return set()


def holder(root: Path, prefix: str) -> Path:
    """Return the folder with files of this prefix: `root` or one in it; `root` if none has any."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()]
    except OSError:
        return root
    found = [each for each in folders if any(name.startswith(prefix) for name in listed(each))]
    return next(iter(found), root)


def of_frontends(folder: Path) -> set[str]:
    """Return names of the traces there that API servers and AsyncLLMs wrote of themselves."""
    return {name for name in listed(folder) if is_trace(name) and _FRONTEND in name}


def prefix_of(name: str) -> str:
    """Return a capture's name as vLLM takes it: 1 to 128 of `A-Za-z0-9._-`, the first a letter or a digit.

    Of a name that cannot stay as it is, the end is a digest of all of it: no two captures share a prefix.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    cleaned = cleaned if cleaned[:1].isalnum() else f"c{cleaned}"
    if cleaned == name and len(name) <= _PREFIX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{cleaned[: _PREFIX - len(digest) - 1]}-{digest}"


def step_of(name: str) -> int | None:
    """Return the step of the capture that a file is named after; None for other names."""
    found = _CAPTURE.match(name)
    return None if found is None else int(found[1])


def is_output(name: str) -> bool:
    return not name.startswith(TEMPORARY) and bool(is_trace(name) or _TABLE.search(name))


def changed_ns(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return when each trace and its table were whole, unix ns, by the stem of their names."""
    changed: dict[str, int] = {}
    for name in names:
        with suppress(OSError):
            at_ns = (folder / name).stat().st_mtime_ns
            for stem in _stems(name):
                changed[stem] = max(changed.get(stem, 0), at_ns)
    return changed


def whole_ns(changed: Mapping[str, int], name: str) -> int | None:
    """`changed_ns` of one trace, also under the name that it has since it was moved."""
    (own,) = _stems(name)
    return max((ns for stem, ns in changed.items() if own.endswith(stem)), default=None)


def _stems(name: str) -> tuple[str, ...]:
    """Return the part that the names of a trace and of its table have in common."""
    if table := re.fullmatch(r"profiler_out_(\d+)\.txt", name):  # up to 0.30
        return f"rank-{table[1]}", f"rank{table[1]}"
    return (re.sub(r"(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?$|\.profiler_out\.txt$", "", name),)


def is_trace(name: str) -> bool:
    return bool(_TRACE.search(name)) or is_recording(name)


def is_recording(name: str) -> bool:
    """Return whether `name` is a folder of the Ascend profiler. All of a worker's have the name of its first
    capture.
    """
    return bool(_RECORDING.search(name))


def move(names: Iterable[str], source: Path, target: Path, prefix: str) -> list[Path]:
    """Move files to a capture's folder, under names that no other capture's have. Sorted."""
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


def wait_until_complete(paths: Iterable[Path]) -> None:
    """Return once all traces are whole.

    Raises:
        ValueError: one is not, though it was given time.
    """
    until = time.monotonic() + _WAIT_S
    for path in paths:
        why = unfinished(path)
        while why is not None:
            if time.monotonic() > until:
                raise ValueError(f"{path} is not complete ({why})")
            time.sleep(0.1)
            why = unfinished(path)


def read(path: Path) -> Trace:
    """Return the facts in a file's content, or else in its name."""
    head, tail, iterations = (b"", b"", 0) if path.is_dir() else _scan(path)
    stated, pid = _STATED.search(head), _PID.search(head) or _RECORDING.search(path.name)
    named, dp = _RANK.search(path.name), _DP.search(path.name)
    rank = int(stated[1]) if stated else int(named[1]) if named else None
    number = int(pid[1]) if pid else None
    return Trace(
        path=path,
        frontend=_FRONTEND in path.name,
        rank=rank,
        world_size=int(stated[2]) if stated else None,
        dp=int(dp[1]) if dp else _dp_of_process(number),
        pid=number,
        host=host[1].decode(errors="replace") if (host := _HOST.search(head)) else None,
        window=recorded_window(head, tail),
        iterations=iterations,
    )


def _dp_of_process(pid: int | None) -> int | None:
    """vLLM writes a worker's place in its title (`VLLM::Worker_DP1_TP0`), and dense models nowhere else."""
    if pid is None:
        return None
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return None
    found = _TITLE.search(title)
    return int(found[1]) if found and "Worker" in title else None


def _scan(path: Path) -> tuple[bytes, bytes, int]:
    """Return its head, its end, and the number of iterations it names. 0.3 s for 150 MB of JSON."""
    from isal import igzip

    head = tail = b""
    count = 0
    with igzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[no-untyped-call]
        while chunk := file.read(1 << 20):
            if len(head) < _HEAD:
                head += chunk[:_HEAD]
            kept = tail[-(len(_ITERATION) - 1) :]  # too short for a whole one, which would count twice
            count += (kept + chunk).count(_ITERATION)
            tail = (tail + chunk)[-_TAIL:]
    return head, tail, count


def unfinished(path: Path) -> str | None:
    """Return the reason why a trace is incomplete; None if it is whole."""
    from isal import igzip

    if path.is_dir():
        return None if any(path.glob("profiler_info*.json")) else "it has no profiler_info.json"
    last = b""
    try:
        # In chunks: a trace can be larger than the memory.
        with igzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[no-untyped-call]
            while chunk := file.read(1 << 20):
                last = (last + chunk)[-16:]
    except Exception as error:  # igzip's own error is no OSError
        return f"{type(error).__name__}: {error}"
    return None if last.rstrip().endswith(b"}") else "its last bracket is not there"


async def bring_home(call: Call, folder: Path, reports: Iterable[Mapping[str, Any] | None]) -> dict[str, str]:
    """Copy the traces of workers on other hosts, whose disks this process does not see.

    A worker with our extension hands over the files of its last capture in pieces, through the engine's own
    calls. They stay there as well.

    Args:
        folder: Where the capture's files belong; what lies elsewhere is left alone.
        reports: The answers of the workers' `stepscope_release`.

    Returns:
        `{"worker on <host>": why}` for what stays there alone.
    """
    left: dict[str, str] = {}
    for worker in reports:
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
    answers = await call("collective_rpc", "stepscope_read", args=(path, offset))
    pieces = [piece for piece in answers if piece is not None]
    if not pieces:
        raise EngineError("no worker has it any more")
    return bytes(pieces[0])
