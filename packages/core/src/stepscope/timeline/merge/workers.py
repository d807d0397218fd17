"""Rows whose traces other processes read, move and compress, where a merge is large and a core is idle.

All take rows as they get to them: we from the first one on, workers from the last one back. Who makes a
row's file, in a folder beside the timeline, has it. A worker leaves the compressed events there, and in
another file what is to be said of them; we put them into the timeline when we get there. What a worker does
not end well, killed by the kernel perhaps, we do ourselves.

Workers are plain `python -c` children, as in `activity/pool.py`, which says why.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from stepscope.files.storage.temporary import temporary
from stepscope.timeline.children import command_of
from stepscope.timeline.merge.row_writer import Common, RowTraces, Told, write_row
from stepscope.timeline.merge.template import Cut
from stepscope.timeline.merge.tracks import Tracks
from stepscope.timeline.merge.write import EventsFile, Piece
from stepscope.timeline.readers.blocks import keep_memory
from stepscope.timeline.step.rows import Axis

WORTH = 8 << 20
"""Bytes of compressed traces for each process: JSON of 100 MB or more, 0.8 s of CPU. A worker takes 0.1 s to
start."""
MOST = 2
"""Each worker takes 30 MB, most of that its interpreter."""
_CHILD = "from stepscope.timeline.merge.workers import work; work()"
_POLL_S = 0.02
_NICE = 5
"""How much a worker stands back: it uses what nobody else wants."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of a row that it has written."""

    piece: Piece
    told: Told


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker gets: all rows, and how to write them."""

    rows: list[RowTraces]
    own: list[list[str]]
    """Of each row, the tracks of ours in it."""
    pids: list[int]
    """Of the timeline's rows."""
    axis: Axis
    cut: Cut
    files: int
    folder: bytes
    """As the system has it: it may be no UTF-8."""
    parent: int
    """Its process."""

    def common(self) -> Common:
        tracks = Tracks(self.pids)
        for of, names in zip(self.rows, self.own, strict=True):
            for name in names:
                tracks.own(of.row, name, 0)
        tracks.take()  # they are named already
        return Common(self.axis, self.cut, self.files, tracks)


def idle_cores() -> int:
    """How many there are beside the one that we run on; none on a busy machine."""
    try:
        cores = len(os.sched_getaffinity(0))
        return cores - 1 if os.getloadavg()[0] <= cores else 0
    except (AttributeError, OSError):  # not on Linux, or without /proc
        return 0


def workers_for(sizes: Sequence[int], cores: int) -> int:
    """How many processes help with rows of these sizes, in bytes of files, when so many cores are idle."""
    return max(0, min(MOST, cores, len(sizes) - 1, sum(sizes) // WORTH - 1))


class Workers:
    """Those of one merge. `close` ends them."""

    def __init__(self, given: Given, ours: Collection[int], on_read: Callable[[int], None] | None) -> None:
        """
        Args:
            ours: Rows, by their number, that they leave to us.
            on_read: Called with the size of a row's files when it is seen that a worker has written it.
        """
        self._given = given
        self._folder = _folder(given)
        self._ours = [number for number in ours if _claimed(self._folder, number)]
        self._on_read = on_read
        self._heard = set(self._ours)
        """Rows of which nothing is to be said to `on_read` any more."""
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> None:
        """Starts so many, or as many as the machine lets us."""
        command = command_of(_CHILD)
        if command is None:
            return
        rows = self._folder / "rows.json"
        with suppress(OSError):
            rows.write_bytes(msgspec.json.encode(self._given))
            for _ in range(count):
                with rows.open("rb") as stdin:
                    child = subprocess.Popen(
                        command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                self._running.append(child)

    def made(self, number: int) -> tuple[Made, Path] | None:
        """What a worker made of a row; waits for it where one is at it. None: it is ours to do."""
        self._tell()
        if number in self._ours or _claimed(self._folder, number):
            return None
        told = _told(self._folder, number)
        while not told.exists() and (running := [each for each in self._running if each.poll() is None]):
            self._tell()
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(_POLL_S)
        if not told.exists():
            clear(_text(self._folder, number))
            return None
        self._hear(number)
        return msgspec.json.decode(told.read_bytes(), type=Made), _text(self._folder, number)

    def close(self) -> None:
        for child in self._running:
            child.kill()
        for child in self._running:
            child.wait()

    def _tell(self) -> None:
        """Says what has been written since, from the last row back as far as it goes."""
        for number in reversed(range(len(self._given.rows))):
            if number not in self._heard:
                if not _told(self._folder, number).exists():
                    return
                self._hear(number)

    def _hear(self, number: int) -> None:
        if number in self._heard:
            return
        self._heard.add(number)
        if self._on_read is not None:
            self._on_read(sum(size_of(trace.path) for trace in self._given.rows[number].traces))


@contextmanager
def workers(
    rows: Sequence[RowTraces],
    common: Common,
    beside: Path,
    count: int,
    ours: Collection[int],
    on_read: Callable[[int], None] | None,
) -> Iterator[Callable[[int], tuple[Made, Path] | None]]:
    """Gives `Workers.made` of so many, and them a folder beside the timeline, until the block ends."""
    if count == 0:
        yield lambda number: None
        return
    folder = temporary(beside)
    folder.mkdir(0o700)
    try:
        given = Given(
            rows=list(rows),
            own=[common.tracks.owned(of.row) for of in rows],
            pids=common.tracks.pids,
            axis=common.axis,
            cut=common.cut,
            files=common.files,
            folder=os.fsencode(folder.resolve()),
            parent=os.getpid(),
        )
        with closing(Workers(given, ours, on_read)) as some:
            some.start(count)
            yield some.made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def work() -> None:
    """The life of a worker: it takes rows from the last one back, until all are taken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked, and it ends with that
    os.nice(_NICE)
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Given)
    common = given.common()
    keep_memory()
    for number in reversed(range(len(given.rows))):
        if _claimed(_folder(given), number):
            _make(given, common, number)


def _make(given: Given, common: Common, number: int) -> None:
    folder = _folder(given)

    def on_read(_: int) -> None:
        if os.getppid() != given.parent:
            raise SystemExit("nobody waits for this any more")

    with _text(folder, number).open("wb") as sink:
        out = EventsFile(sink)
        told = write_row(given.rows[number], common, out, on_read=on_read)
        piece = out.piece()
    made = _told(folder, number)
    written = made.with_suffix(".part")
    written.write_bytes(msgspec.json.encode(Made(piece=piece, told=told)))
    os.replace(written, made)


def clear(text: Path) -> None:
    """Gives its room on the disk to the timeline. The file stays, or a worker that comes late had the row."""
    with suppress(OSError):
        os.truncate(text, 0)


def _claimed(folder: Path, number: int) -> bool:
    """Whether the row is ours from now on: whoever makes its file first has it."""
    try:
        os.close(os.open(_text(folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _folder(given: Given) -> Path:
    return Path(os.fsdecode(given.folder))


def size_of(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _text(folder: Path, number: int) -> Path:
    return folder / f"{number}.deflate"


def _told(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"
