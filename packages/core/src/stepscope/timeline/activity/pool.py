"""Reading of several traces, on several cores if they are large.

The readers are plain `python -c` children. Each takes one path per line and answers with one line of JSON.
`multiprocessing` is not used: a fork would copy the caller's threads, and a spawn would run its script again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from stepscope.timeline.activity.content import TraceContent
from stepscope.timeline.activity.content_reader import nothing_read, read_trace
from stepscope.timeline.children import command_of

SMALL = 4 << 20
"""Total size of files on disk below which a child costs more time than it saves: it starts in 0.1 s."""
READERS = 8
_CHILD = "from stepscope.timeline.activity.pool import serve; serve()"


def read_all(paths: Sequence[Path], on_read: Callable[[int], None] | None = None) -> list[TraceContent]:
    """Return the content of each trace, in the order of `paths`."""
    sizes = [_size(path) for path in paths]
    readers = min(len(paths), len(os.sched_getaffinity(0)), READERS)
    command = command_of(_CHILD)
    if readers < 2 or sum(sizes) < SMALL or command is None:
        return [read_trace(path, on_read) for path in paths]
    # The largest file goes first, so that it does not run alone at the end.
    todo: SimpleQueue[int] = SimpleQueue()
    for at in sorted(range(len(paths)), key=lambda at: -sizes[at]):
        todo.put(at)
    contents: dict[int, TraceContent] = {}

    def work(reader: _Reader) -> None:
        with reader:
            while not reader.over:
                try:
                    at = todo.get_nowait()
                except Empty:
                    return
                contents[at] = reader.read(paths[at])
                if on_read is not None:
                    on_read(sizes[at])

    pool = [_Reader(command) for _ in range(readers)]
    with ThreadPoolExecutor(readers) as threads:
        try:
            for done in [threads.submit(work, reader) for reader in pool]:
                done.result()
        except BaseException:  # Ctrl-C too: the user does not wait for the rest of a large file
            for reader in pool:
                reader.give_up()
            raise
    return [contents[at] for at in range(len(paths))]


def serve() -> None:
    """Run a reader: take paths from stdin and write contents to stdout, one JSON line each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then ends this process
    for line in sys.stdin:
        sys.stdout.buffer.write(msgspec.json.encode(read_trace(Path(json.loads(line)))) + b"\n")
        sys.stdout.buffer.flush()


class _Reader:
    """One child process, replaced by a new one if it died."""

    def __init__(self, command: list[str]) -> None:
        self.over = False
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._end(self._child)

    def give_up(self) -> None:
        """Kill the child while another thread waits for its answer."""
        self.over = True
        child = self._child
        if child is not None:
            child.kill()

    def read(self, path: Path) -> TraceContent:
        try:
            child = self._child or self._start()
        except OSError:  # no further process can be started
            return read_trace(path)
        if child.stdin is None or child.stdout is None:
            return nothing_read("its reader has no pipes")
        try:
            child.stdin.write(json.dumps(str(path)).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            self._end(child)
            return nothing_read(f"not read: its reader ended with code {child.returncode}")
        return msgspec.json.decode(answer, type=TraceContent)

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """Close the pipes of the child, which ends it, and wait for it."""
        self._child = None
        for pipe in (child.stdin, child.stdout):
            with suppress(BrokenPipeError):  # it died with a path unread
                if pipe is not None:
                    pipe.close()
        child.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
