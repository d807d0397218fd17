"""Traces of one capture: complete files, and the facts that they state about themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.engines.artifacts import recorded_window
from stepscope_vllm._files.names import dp_of, is_frontend, is_recording, pid_of, rank_of

_STATED = re.compile(rb'"distributedInfo":\s*\{[^{}\[\]]*?"rank":\s*(\d+)[^{}\[\]]*?"world_size":\s*(\d+)')
_HOST = re.compile(rb'"host_name":\s*"([^"\\]{1,255})"')
_PID = re.compile(rb'"pid":\s*(\d+)')
_TITLE = re.compile(r"(?:^|_)DP(\d+)(?:_|$)")
_HEAD = 1 << 16
"""Bytes of a trace in which everything but its events stands."""
_TAIL = 1 << 12
"""Bytes behind the events, in which torch writes when it began and ended to record."""
_ITERATION = b'"name": "execute_'
_COPY = b'"cat": "gpu_user_annotation", '
"""Bytes before the name of an annotation that stands in the trace a second time, at the times of the GPU."""
_EMPTY = re.compile(rb'"name": "execute_(?:\d+_)?context_0\([^"]*_generation_0\(')
"""The name of an iteration without a request: engines run these behind the last one, or to keep step."""
_AROUND = 256
"""Bytes of an iteration's name, and before it, that one look takes in."""
_WAIT_S = 10.0
"""The wait for a file that still grows although its worker has answered (a slow shared disk)."""


class Trace(NamedTuple):
    """Facts that one file states about itself."""

    path: Path
    frontend: bool
    rank: int | None
    """The worker's rank in its torch.distributed world."""
    world_size: int | None
    """The size of that world."""
    dp: int | None
    """Number of the replica's data-parallel engine that wrote it."""
    pid: int | None
    host: str | None
    """Host on which it was recorded, which may not be where it is published."""
    window: tuple[int, int] | None = None
    """Start and end of torch's recording: unix ns of that host."""
    iterations: int = 0
    """Engine iterations that it names, those without a request included, as vLLM counts them."""
    empty: int = 0
    """Iterations without a request."""

    @property
    def is_recording(self) -> bool:
        """Return whether it is a recording of the Ascend profiler."""
        return is_recording(self.path.name)


def wait_until_complete(paths: Iterable[Path]) -> None:
    """Wait until all traces are complete.

    Raises:
        ValueError: one of them is still incomplete after 10 s.
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
    """Read the facts that a file states in its content, or else in its name."""
    head, tail, iterations, empty = (b"", b"", 0, 0) if path.is_dir() else _scan(path)
    world, process = _STATED.search(head), _PID.search(head)
    pid = int(process[1]) if process else pid_of(path.name)
    dp = dp_of(path.name)
    return Trace(
        path=path,
        frontend=is_frontend(path.name),
        rank=int(world[1]) if world else rank_of(path.name),
        world_size=int(world[2]) if world else None,
        dp=_dp_of_process(pid) if dp is None else dp,
        pid=pid,
        host=host[1].decode(errors="replace") if (host := _HOST.search(head)) else None,
        window=recorded_window(head, tail),
        iterations=iterations,
        empty=empty,
    )


def _dp_of_process(pid: int | None) -> int | None:
    """Return the data-parallel engine that the title of a process names (`VLLM::Worker_DP1_TP0`).

    For dense models vLLM writes it nowhere else.
    """
    if pid is None:
        return None
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return None
    match = _TITLE.search(title)
    return int(match[1]) if match and "Worker" in title else None


def _scan(path: Path) -> tuple[bytes, bytes, int, int]:
    """Return the head and the end of a trace, the number of iterations that it names, and of the empty ones.

    Takes 0.3 s for 150 MB of JSON.
    """
    from isal import igzip

    head = tail = text = b""
    first = 0  # of the text, where the part begins that is still to be counted
    names: list[bytes] = []
    with igzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[no-untyped-call]
        while chunk := file.read(1 << 20):
            if len(head) < _HEAD:
                head += chunk[:_HEAD]
            tail = (tail + chunk)[-_TAIL:]
            text += chunk
            until = max(first, len(text) - _AROUND)
            names += _names(text, first, until)
            begin = max(0, until - _AROUND)
            text, first = text[begin:], until - begin
    names += _names(text, first, len(text))
    return head, tail, len(names), sum(_EMPTY.match(name) is not None for name in names)


def _names(text: bytes, first: int, until: int) -> Iterator[bytes]:
    """Yield the names of iterations that begin in a part of the text, with what follows them.

    It uses `find`, because a pattern costs as much as unpacking the file.
    """
    at = text.find(_ITERATION, first)
    while 0 <= at < until:
        if not text.startswith(_COPY, max(0, at - len(_COPY))):
            yield text[at : at + _AROUND]
        at = text.find(_ITERATION, at + 1)


def unfinished(path: Path) -> str | None:
    """Return the reason why a trace is incomplete; None if it is complete."""
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
    return None if last.rstrip().endswith(b"}") else "its last bracket is missing"
