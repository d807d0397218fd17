"""Transfer of recordings from hosts that do not share the folder with the owner.

A worker is *apart* if it does not find the owner's part of the manifest when its capture opens. Its complete
files are fetched in pieces by Ray calls, and its part of the manifest last. So if the part of a process is
here, all other files of the process are here too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope._recording.session import budget
from stepscope.config import ProfileConfig
from stepscope.errors import EngineError
from stepscope.files.layout import StepLayout, sidecar_of
from stepscope.files.storage import PIECE, Arrival

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

_KEPT = 256
"""Largest number of captures that a worker remembers until their files are fetched. Without a limit, captures
of an owner that has died would be remembered for ever."""


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file on the host of a worker."""

    path: str
    """Path of the file, relative to the step's folder."""
    size_bytes: int


# Functions that run in the worker.

_sessions: dict[str, Session] = {}
"""{capture id: session}, the oldest first. Writers: `keep` and `release`."""
_given_up: deque[str] = deque(maxlen=_KEPT)
"""Ids of captures that were dropped because of `_KEPT`. One writer: `keep`."""


def keep(session: Session) -> None:
    """Remember the session until `release`, because the owner will fetch its files."""
    _sessions[session.capture_id] = session
    while len(_sessions) > _KEPT:
        oldest = next(iter(_sessions))
        release(oldest)
        _given_up.append(oldest)


def release(capture_id: str) -> None:
    """Forget a capture whose files were fetched or are not wanted."""
    _sessions.pop(capture_id, None)


def files_of(capture_id: str, engine_files: Sequence[str]) -> list[Remote]:
    """Return the files of this process, and of engines on its host. The part of the manifest is last.

    Args:
        engine_files: Paths of an engine's files, relative to the step's folder. Missing files are left out.

    Returns:
        The files, without the part if it could not be written.

    Raises:
        EngineError: this process has no such capture, or has not closed the capture.
    """
    session = _session(capture_id)
    layout, part = session.layout, session.manifest_part.record
    if part.closed is None:
        raise EngineError("its capture is still open there")
    own = layout.part_of(session.process, session.run_id, session.number)
    if not own.is_file():
        session.manifest_part.write()
    written = [artifact.path for item in part.expected for artifact in item.artifacts]
    named = [_within(layout, path) for path in (*engine_files, *written)]
    named += [layout.spans_of(session.process, session.run_id, session.number)]
    named += [layout.counters_of(session.process, session.run_id, session.number), own]
    files = dict.fromkeys(file for path in named for file in (*_below(path), sidecar_of(path)))
    return [
        Remote(path=file.relative_to(layout.root).as_posix(), size_bytes=file.stat().st_size)
        for file in files
        if file.is_file()
    ]


def piece_of(capture_id: str, path: str, offset: int) -> bytes:
    """Return up to `PIECE` bytes of a file, starting at `offset`.

    Raises:
        EngineError: this process has no such capture.
        OSError: the file cannot be read.
    """
    with _within(_session(capture_id).layout, path).open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)


def _session(capture_id: str) -> Session:
    session = _sessions.get(capture_id)
    if session is not None:
        return session
    if capture_id in _given_up:
        raise EngineError(f"{_KEPT} later captures waited to be fetched, and the worker keeps no more")
    raise EngineError("the worker is another process than the one that recorded (did it restart?)")


def _below(path: Path) -> Iterator[Path]:
    """Yield the files of an artifact, which may be a folder."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in sorted(names))


# Functions that run in the owner.


class Home:
    """The step's folder on the owner's host, into which files are fetched."""

    def __init__(self, layout: StepLayout, config: ProfileConfig) -> None:
        self._layout = layout
        self._config = config

    def path_of(self, path: str) -> Path:
        """Return the local path of `path`, which is relative to the step's folder."""
        return _within(self._layout, path)

    def is_part(self, file: Remote) -> bool:
        """Return whether `file` is a part of the manifest."""
        return self.path_of(file.path).parent == self._layout.processes

    def begin(self, file: Remote) -> Arrival | str | None:
        """Begin to receive a file. May block.

        Returns:
            The arrival; or the reason why a trace is not fetched; or None if the file is here already (a slow
                shared disk).
        """
        path = self.path_of(file.path)
        if path.exists():
            return None
        refused = budget.over_budget(self._config) if path.is_relative_to(self._layout.traces) else None
        return Arrival(path) if refused is None else refused


def _within(layout: StepLayout, path: str) -> Path:
    """Return the absolute path of `path`, which is relative to the step's folder.

    Raises:
        EngineError: `path` is not within the step's folder.
    """
    root = layout.root.resolve()
    target = (root / path).resolve()
    if not target.is_relative_to(root) or target == root:
        raise EngineError(f"{path!r} is no path in the step's folder")
    return layout.root / target.relative_to(root)
