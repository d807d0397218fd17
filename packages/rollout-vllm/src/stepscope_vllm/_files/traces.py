"""Traces of one capture: whether they are complete, and the facts that they contain."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.engines.artifacts import recorded_window
from stepscope_vllm._files.engine_folder import dp_of, is_frontend, is_recording, pid_of, rank_of

_STATED = re.compile(rb'"distributedInfo":\s*\{[^{}\[\]]*?"rank":\s*(\d+)[^{}\[\]]*?"world_size":\s*(\d+)')
_HOST = re.compile(rb'"host_name":\s*"([^"\\]{1,255})"')
_PID = re.compile(rb'"pid":\s*(\d+)')
_TITLE = re.compile(r"(?:^|_)DP(\d+)(?:_|$)")
_HEAD = 1 << 16
"""Number of bytes at the beginning of a trace that contain everything except the events."""
_TAIL = 1 << 12
"""Number of bytes at the end of a trace that contain the times at which torch began and ended to record."""
_ITERATION = b'"name": "execute_'
_COPY = b'"cat": "gpu_user_annotation", '
"""Bytes before the name of an annotation that torch copied, with the times on the GPU."""
_EMPTY = re.compile(rb'"name": "execute_(?:\d+_)?context_0\([^"]*_generation_0\(')
"""Name of an iteration without a request. An engine runs such iterations after the last request, or to keep
up with the other data-parallel engines."""
_AROUND = 256
"""Number of bytes of an iteration's name and of the text before it that are inspected."""
_WAIT_S = 10.0
"""Longest wait for a file that still grows although its worker has answered (a slow shared disk)."""


class Trace(NamedTuple):
    """Facts about one trace, read from its file."""

    path: Path
    frontend: bool
    rank: int | None
    """The worker's rank in its torch.distributed world, or None if unknown."""
    world_size: int | None
    """Number of processes in the worker's torch.distributed world, or None if unknown."""
    dp: int | None
    """Number of the data-parallel engine that wrote the file, or None if unknown."""
    pid: int | None
    host: str | None
    """Host of the recorded process, or None if unknown. Another host may publish the file."""
    window: tuple[int, int] | None = None
    """Start and end of torch's recording in unix ns of `host`, or None if unknown."""
    iterations: int = 0
    """Number of engine iterations that the file names, as vLLM counts: including iterations without a
    request."""
    empty: int = 0
    """Number of iterations without a request."""

    @property
    def is_recording(self) -> bool:
        """Return whether the file is a recording of the Ascend profiler."""
        return is_recording(self.path.name)


def wait_until_complete(paths: Iterable[Path]) -> None:
    """Wait until all traces are complete.

    Raises:
        ValueError: a trace is still incomplete after 10 s.
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
    """Return the facts about a trace, from the file's content, or else from the file's name."""
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
    """Return the number of the data-parallel engine in a process title such as `VLLM::Worker_DP1_TP0`, or
    None if the title has no number.

    For dense models, the title is the only place with this number.
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
    """Return (first bytes, last bytes, number of iterations, number of iterations without a request) of a
    trace.

    Takes 0.3 s for 150 MB of JSON.
    """
    from isal import igzip

    head = tail = text = b""
    first = 0  # index in `text` of the first byte that was not searched yet
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
    """Yield the names of iterations that begin between `first` and `until`, each with the text after it.

    The search uses `find`, because a regular expression takes as long as unpacking the file.
    """
    at = text.find(_ITERATION, first)
    while 0 <= at < until:
        if not text.startswith(_COPY, max(0, at - len(_COPY))):
            yield text[at : at + _AROUND]
        at = text.find(_ITERATION, at + 1)


def unfinished(path: Path) -> str | None:
    """Return the reason why a trace is incomplete, or None if it is complete."""
    from isal import igzip

    if path.is_dir():
        return None if any(path.glob("profiler_info*.json")) else "it has no profiler_info.json"
    last = b""
    try:
        # Read in chunks, because a trace can be larger than the memory.
        with igzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:  # type: ignore[no-untyped-call]
            while chunk := file.read(1 << 20):
                last = (last + chunk)[-16:]
    except Exception as error:  # igzip's own error is no OSError
        return f"{type(error).__name__}: {error}"
    return None if last.rstrip().endswith(b"}") else "its last bracket is missing"


class Layout(NamedTuple):
    """The distribution of one engine over GPUs."""

    tp: int
    pp: int
    dp: int
    external: bool
    """True if each worker is a process of a larger torch.distributed job and has its own engine object."""
    pcp: int = 1
    """Size of prefill context parallelism. In the order of the ranks, this axis is between tp and pp."""

    @property
    def engine(self) -> int:
        """Return the number of workers of one data-parallel engine."""
        return self.tp * self.pcp * self.pp

    @property
    def size(self) -> int:
        return self.engine * self.dp


def global_rank(trace: Trace, layout: Layout | None, replica: int) -> int | None:
    """Return the global rank of the worker that wrote a trace. None for a trace of a front end, and if the
    rank is unknown or contradicts the layout.
    """
    if trace.frontend or trace.rank is None or layout is None:
        return None
    if layout.external:
        return trace.rank  # the rank in torch.distributed is the rank in the whole job
    place = _place(trace, trace.rank, layout)
    if place is None or place[1] is None:
        return None
    return replica * layout.size + place[1] * layout.engine + place[0]


def topology(trace: Trace, layout: Layout | None) -> dict[str, int] | None:
    """Return the position of a worker in the layout: `{"tp": 1, "pp": 0, "dp": 0}`, or None if unknown.

    `pcp` is present if the engine has that axis. `dp` is absent if the data-parallel engine is unknown.
    """
    if trace.frontend or trace.rank is None or layout is None:
        return None
    place = _place(trace, trace.rank, layout)
    if layout.external:
        place = trace.rank % layout.engine, 0
    if place is None:
        return None
    inside, dp = place
    axes = {"tp": inside % layout.tp, "pp": inside // (layout.tp * layout.pcp)}
    if layout.pcp > 1:
        axes["pcp"] = inside // layout.tp % layout.pcp
    return axes if dp is None else {**axes, "dp": dp}


def contradiction(trace: Trace, layout: Layout | None) -> str | None:
    """Return the reason why an engine with this layout cannot have written a trace, or None if it can."""
    if trace.frontend or trace.rank is None or layout is None or layout.external:
        return None
    if _place(trace, trace.rank, layout) is not None:
        return None
    of = "" if trace.world_size is None else f" of {trace.world_size}"
    return (
        f"{trace.path.name} is of worker {trace.rank}{of}, and the engine was declared to have {layout.size} "
        f"(tensor parallel {layout.tp}, pipeline parallel {layout.pp}, data parallel {layout.dp}): its "
        "global rank is not known. Fix: VllmServer(url, tensor_parallel_size=...), as it was served"
    )


def _place(trace: Trace, rank: int, layout: Layout) -> tuple[int, int | None] | None:
    """Return (rank of the worker in its data-parallel engine, number of that engine or None if unknown).

    Return None if the trace contradicts the layout.
    """
    dp = trace.dp if layout.dp > 1 else 0
    if trace.world_size == layout.size and layout.dp > 1:
        # All data-parallel engines are in one torch.distributed world (mixture of experts).
        dp, rank = divmod(rank, layout.engine)
    elif trace.world_size is None and layout.dp > 1 and dp == rank // layout.engine:
        rank %= layout.engine  # the rank in the file's name counts the workers of all data-parallel engines
    elif trace.world_size not in (None, layout.engine):
        return None
    return (rank, dp) if rank < layout.engine and (dp or 0) < layout.dp else None


def local_ranks(wanted: Collection[int] | None, layout: Layout | None, replica: int) -> list[int] | None:
    """Return the wanted ranks in a worker's own numbering; None for all.

    Return None also if there are several data-parallel engines, because the engines share a numbering. Then
    all workers write, and the files of unwanted ranks are removed afterwards.
    """
    if wanted is None or layout is None or layout.dp > 1:
        return None
    if layout.external:
        return list(wanted)
    first = replica * layout.size
    return [rank - first for rank in wanted if first <= rank < first + layout.size]
