"""The folder to which SGLang writes one capture, and the files in it."""

from __future__ import annotations

import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.engines.artifacts import recorded_window
from stepscope.engines.passes import take
from stepscope.errors import EngineError
from stepscope.files.passes import PassFile
from stepscope_sglang._engine_side.passes import ALONE, ASK, END

Stage: TypeAlias = Literal["prefill", "decode"]
Kind: TypeAlias = Literal["torch_trace", "merged_trace", "cuda_memory_snapshot"]
_NAME = re.compile(
    r"-?TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?"
    r"(?P<memory>-memory)?(?:-(?P<stage>EXTEND|DECODE|prefill|decode))?\.(?:trace\.json\.gz|pickle)\Z"
)
_STAGES: dict[str, Stage] = {
    "EXTEND": "prefill",
    "prefill": "prefill",
    "DECODE": "decode",
    "decode": "decode",
}
_CHUNK = 1 << 20
_HEAD = 1 << 16
"""Number of bytes at the beginning of a trace that contain the list of process groups."""
_TAIL = 1 << 12
"""Number of bytes at the end of a trace that contain the times at which torch began and ended to record."""
_LONGEST = 64
"""Number of bytes that suffice to recognise a pass: up to its name, and from the start of the name on."""
_DISTRIBUTED = re.compile(rb'"distributedInfo":.*?"rank": (\d+), "world_size": (\d+)', re.DOTALL)
_PID = re.compile(rb'"process_name",[^{}]*?"pid": (\d+)')
_STEP = b'"name": "step['
_COPY = b'"cat": "gpu_user_annotation", '
"""Bytes before `_STEP` in an annotation that torch copied, with the times on the GPU."""
_PREFILL = b"EXTEND", b"MIXED", b"SPLIT_PREFILL", b"DLLM_EXTEND"
_DECODE = b"DECODE", b"TARGET_VERIFY", b"VERIFY"
"""Words after `_STEP` in the name of a decode pass. `_PREFILL` has the words of a prefill pass."""


class TraceName(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a file's name."""

    kind: Kind
    topology: dict[str, int]
    stage: Stage | None


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in a trace's content."""

    complete: bool
    rank: int | None = None
    """The rank in the process group of the schedulers, or None if unknown. Each data-parallel scheduler has
    its own group."""
    pid: int | None = None
    prefills: int = 0
    """Number of prefill passes. 0 if the engine names no passes (before 0.5.11)."""
    decodes: int = 0
    window: tuple[int, int] | None = None
    """Start and end of torch's recording in unix ns of the scheduler's host, or None if unknown."""

    @property
    def passes(self) -> int:
        return self.prefills + self.decodes


def parse_name(name: str) -> TraceName | None:
    """Return the facts in a file's name, or None if SGLang's profiler did not write the file."""
    if name.startswith("merged-") and name.endswith(".trace.json.gz"):
        return TraceName(kind="merged_trace", topology={}, stage=None)
    match = _NAME.search(name)
    if match is None:
        return None
    topology = {axis: int(match[axis]) for axis in ("tp", "dp", "pp", "ep") if match[axis] is not None}
    stage = _STAGES[match["stage"]] if match["stage"] else None
    kind: Kind = "cuda_memory_snapshot" if name.endswith(".pickle") else "torch_trace"
    return TraceName(kind=kind, topology=topology, stage=stage)


def read(path: Path) -> Content:
    """Return the facts in a trace. Reads the whole file (0.3 s for 150 MB of JSON).

    A damaged file raises no error; `complete` is then False.
    """
    from isal import igzip

    head, tail, end, first, complete = b"", b"", b"", 0, False
    steps: Counter[Stage] = Counter()
    try:
        with igzip.open(path, "rb") as file:  # type: ignore[no-untyped-call]  # isal has no types here
            while chunk := file.read(_CHUNK):
                if len(head) < _HEAD:
                    head += chunk[:_HEAD]
                end = (end + chunk)[-_TAIL:]
                text = tail + chunk
                # A name near the end of the text is counted with the next chunk.
                limit = max(first, len(text) - _LONGEST)
                steps += _steps(text, first, limit)
                begin = max(0, limit - _LONGEST)
                tail, first = text[begin:], limit - begin
            steps += _steps(tail, first, len(tail))
            complete = tail.rstrip().endswith(b"}")
    except (EOFError, OSError, zlib.error, igzip.BadGzipFile):  # the file is cut off or still being written
        complete = False
    distributed, pid = _DISTRIBUTED.search(head), _PID.search(head)
    return Content(
        complete=complete,
        rank=int(distributed[1]) if distributed else None,
        pid=int(pid[1]) if pid else None,
        prefills=steps["prefill"],
        decodes=steps["decode"],
        window=recorded_window(head, end) if complete else None,
    )


def _steps(text: bytes, first: int, limit: int) -> Counter[Stage]:
    """Count the forward passes whose names begin between `first` and `limit`.

    The search uses `find`, because a regular expression takes as long as unpacking the file.
    """
    counts: Counter[Stage] = Counter()
    at = text.find(_STEP, first)
    while 0 <= at < limit:
        word = at + len(_STEP)
        if text.startswith(_COPY, max(0, at - len(_COPY))):
            pass
        elif text.startswith(_DECODE, word):
            counts["decode"] += 1
        elif text.startswith(_PREFILL, word):
            counts["prefill"] += 1
        at = text.find(_STEP, word)
    return counts


_LOOK_S = 0.05


class File(NamedTuple):
    """One file that SGLang wrote."""

    path: Path
    name: TraceName

    @property
    def is_trace(self) -> bool:
        """Return whether the file is the trace of one rank."""
        return self.name.kind == "torch_trace"


class CaptureFolder:
    """The folder of one capture. Each file is read once, and again after a change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._contents: dict[Path, tuple[tuple[int, int], Content]] = {}

    def make(self, *, open_to_all: bool) -> None:
        """Make the folder, and check that it can be written. If SGLang could not write, its scheduler would
        die at the stop.

        Raises:
            EngineError: the folder cannot be made or written.
        """
        probe = self.path / "probe"
        try:
            self.path.mkdir(parents=True)
            if open_to_all:
                self.path.chmod(0o777)  # a server may run as another user
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError as error:
            raise EngineError(
                f"SGLang could not write into {self.path.parent}, which would kill its scheduler at the end "
                f"of the capture: {error}. Fix: a save_path that can be written"
            ) from error

    def ask_passes(self, most: int, *, alone: bool) -> None:
        """Ask the schedulers to note their passes. Call this before the start.

        Args:
            most: Largest number of passes to note.
            alone: True if the profiler must not record.
        """
        (self.path / ASK).write_text(str(most))
        if alone:
            (self.path / ALONE).touch()

    def end_passes(self) -> None:
        """Mark the capture as ended. A scheduler writes its passes when it is next asked for its state."""
        with suppress(OSError):
            (self.path / END).touch()

    def passes(self) -> list[PassFile]:
        """Return the passes that the schedulers wrote, and remove the files of passes."""
        return take(self.path, "*")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def exists(self) -> bool:
        return self.path.is_dir()

    def files(self) -> list[File]:
        """Return the files of SGLang's profiler, sorted by name."""
        if not self.exists():
            return []
        named = ((path, parse_name(path.name)) for path in sorted(self.path.iterdir()))
        return [File(path, name) for path, name in named if name is not None]

    def content(self, file: File) -> Content:
        """Return the facts in a file's content. A memory snapshot counts as complete without being read."""
        if file.name.kind == "cuda_memory_snapshot":
            return Content(complete=True)
        status = file.path.stat()
        version = (status.st_size, status.st_mtime_ns)
        known = self._contents.get(file.path)
        if known is None or known[0] != version:
            known = self._contents[file.path] = (version, read(file.path))
        return known[1]

    def is_complete(self, file: File) -> bool:
        return self.content(file).complete

    def traces_are_complete(self, files: Iterable[File]) -> bool:
        """Return whether the traces of single ranks in `files` are all complete."""
        return all(self.is_complete(file) for file in files if file.is_trace)

    def are_of_all_ranks(self, files: Sequence[File], pp: int) -> bool:
        """Return True if all pipeline ranks have written the same files, and the files are complete."""
        names = [file.name for file in files if file.is_trace]
        ranks = Counter((name.topology.get("tp"), name.topology.get("dp"), name.stage) for name in names)
        return all(count >= pp for count in ranks.values()) and self.traces_are_complete(files)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` is true, and return True; return False after `seconds`.

    Used for files, because SGLang answers before the last byte is on the disk.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
