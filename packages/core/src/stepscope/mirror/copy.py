"""Copies a step's folder to a store, and goes on where it or another stopped.

Each file is compared with its copy by size and MD5 before it counts. What counts stands in a record beside
the files, renewed while the work goes on: killed at any moment, it sends no file again that is there whole.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.mirror import (
    Copied,
    MirrorRecord,
    files_below,
    is_copied,
    record_of,
    write_record,
)
from stepscope.files.run import RunRecord
from stepscope.mirror.store import FileChangedError, Store, md5_of

RECORD_EVERY_S = 2.0
GIVE_UP_AFTER = 3
"""Files in a row that could not be copied: the store is away, and the others are not tried."""


class StepCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one step."""

    step: StepLayout
    files: int
    sent: int
    """Files that were not there yet."""
    sent_bytes: int
    failed: dict[str, str]


def copy_step(store: Store, url: str, step: StepLayout) -> StepCopy:
    """Brings the copy of a step up to date. What cannot be copied stands in the answer; it raises nothing.

    Raises:
        OSError: the step's folder cannot be read, or written.
    """
    with _alone(step):
        return _Work(store, url, step).run()


class _Work:
    def __init__(self, store: Store, url: str, step: StepLayout) -> None:
        self._store = store
        self._step = step
        self._host = gethostname()
        record = record_of(step, self._host, url)
        self._url = url
        self._copied = dict(record.files)
        self._failed: dict[str, str] = {}
        self._in_a_row = 0
        self._sent = self._sent_bytes = 0
        self._written = time.monotonic()

    def run(self) -> StepCopy:
        files = files_below(self._step.root)
        self._copied = {path: copied for path, copied in self._copied.items() if path in files}
        try:
            there = self._store.listing(self._step.root.name)
        except Exception as error:
            self._failed = dict.fromkeys(files, _say(error))
            there = None
        if there is not None:
            for path in files:
                self._bring(path, there.get(path))
            self._write()
            if not self._failed:
                self._bring_record()
        self._write()
        return StepCopy(
            step=self._step,
            files=len(files),
            sent=self._sent,
            sent_bytes=self._sent_bytes,
            failed=self._failed,
        )

    def _bring(self, path: str, info: Any) -> None:
        """One file; `info` is what the store says of its copy, None where there is none."""
        file, at = self._step.root / path, f"{self._step.root.name}/{path}"
        if self._in_a_row >= GIVE_UP_AFTER:
            self._failed[path] = f"not tried: {GIVE_UP_AFTER} files in a row could not be copied"
            return
        try:
            before = file.lstat()
            known = self._copied.get(path)
            same_size = info is not None and info.get("size") == before.st_size
            if is_copied(known, before) and same_size:
                return
            self._copied.pop(path, None)
            md5 = md5_of(file)
            if not (same_size and self._store.is_copy(at, info, size_bytes=before.st_size, md5=md5)):
                self._store.put(file, at, md5)
                self._sent += 1
                self._sent_bytes += before.st_size
            after = file.lstat()
        except Exception as error:
            if not file.exists():
                return  # removed, or renamed, meanwhile: nothing is missing
            self._failed[path] = _say(error)
            self._in_a_row += not isinstance(error, FileChangedError)
            return
        self._in_a_row = 0
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            self._failed[path] = _say(FileChangedError())
            return
        self._copied[path] = Copied(size_bytes=before.st_size, mtime_ns=before.st_mtime_ns, md5=md5)
        if time.monotonic() - self._written > RECORD_EVERY_S:
            self._write()

    def _write(self) -> None:
        record = MirrorRecord(url=self._url, files=self._copied, failed=self._failed)
        write_record(self._step, self._host, record)
        self._written = time.monotonic()

    def _bring_record(self) -> None:
        file = self._step.mirror_record(self._host)
        try:
            self._store.put(file, f"{self._step.root.name}/{file.name}", md5_of(file))
        except Exception as error:
            self._failed[file.name] = _say(error)


def copy_run_records(store: Store, run: RunLayout) -> dict[str, str]:
    """Copies what lies beside the steps: `run.json` and its like, `oom/` and `uncaptured/`.
    Another run's `run.json` stays, as it would in a folder.

    Returns:
        What failed, and why.
    """
    failed: dict[str, str] = {}
    for files in (sorted(run.oom.glob("[!.]*")), run.uncaptured_files()):
        _copy_folder(store, files, failed)
    for file in run.runs():
        try:
            mine, name = file.read_bytes(), file.name
            standing = store.read(name)
            if standing == mine:
                continue
            if standing is not None and _run_id(standing) != _run_id(mine):
                name = f"run_{_run_id(mine)}.json"
            store.put(file, name, md5_of(file))
        except Exception as error:
            failed[file.name] = _say(error)
    return failed


def _copy_folder(store: Store, files: list[Path], failed: dict[str, str]) -> None:
    """Files that are written once, or only grow: one whose copy is as long is there."""
    held = None
    for file in files:
        name = f"{file.parent.name}/{file.name}"
        try:
            held = store.listing(file.parent.name) if held is None else held
            if held.get(file.name, {}).get("size") != file.stat().st_size:
                store.put(file, name, md5_of(file))
        except Exception as error:
            failed[name] = _say(error)


def _run_id(data: bytes) -> str | None:
    try:
        return msgspec.json.decode(data, type=RunRecord).run_id
    except (ValueError, msgspec.DecodeError):
        return None


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


@contextmanager
def _alone(step: StepLayout) -> Iterator[None]:
    """Of the processes on this host that copy the step, one at a time; those behind find its work done."""
    path = step.mirror_record(gethostname())
    with open(Path(path.parent, f".{path.stem}.lock"), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: work is done twice, and compared twice
        yield
