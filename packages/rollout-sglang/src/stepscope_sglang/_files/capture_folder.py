"""Folder to which SGLang writes one capture, its files, and whether the files are complete."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stepscope.engines.passes import take
from stepscope.errors import EngineError
from stepscope.files.passes import SUFFIX, PassFile
from stepscope_sglang._engine_side.passes import ASK, END
from stepscope_sglang._files.traces import Content, TraceName, parse_name, read

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
    """Folder of one capture. A file is read once, and read again if it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._contents: dict[Path, tuple[tuple[int, int], Content]] = {}

    def make(self, *, open_to_all: bool) -> None:
        """Make the folder, and check that it can be written: if SGLang cannot write, its scheduler dies at
        the stop.

        Raises:
            EngineError: the folder cannot be made or written.
        """
        probe = self.path / "probe"
        try:
            self.path.mkdir(parents=True)
            if open_to_all:
                self.path.chmod(0o777)  # a server may run as somebody else
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError as error:
            raise EngineError(
                f"SGLang could not write into {self.path.parent}, which would kill its scheduler at the end "
                f"of the capture: {error}. Fix: a save_path that can be written"
            ) from error

    def ask_passes(self, most: int) -> None:
        """Ask the schedulers to note their passes. To be called before the profile starts."""
        (self.path / ASK).write_text(str(most))

    def end_passes(self) -> None:
        """Tell the schedulers that the capture has ended. They write when they are asked for their state."""
        with suppress(OSError):
            (self.path / END).touch()

    def passes(self) -> list[PassFile]:
        """Return the passes that the schedulers wrote, and remove their files."""
        return take(self.path, f"*{SUFFIX}")

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
        """Return whether the traces of single ranks among these files are complete."""
        return all(self.is_complete(file) for file in files if file.is_trace)

    def are_of_all_ranks(self, files: Sequence[File], pp: int) -> bool:
        """Return whether all pipeline ranks have written the files that any one of them has written."""
        names = [file.name for file in files if file.is_trace]
        ranks = Counter((name.topology.get("tp"), name.topology.get("dp"), name.stage) for name in names)
        return all(count >= pp for count in ranks.values()) and self.traces_are_complete(files)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition is true, and return False after `seconds`: writers answer before the last byte
    is on the disk.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
