"""Copies of a step's files, and of a run's records, in a store that fsspec knows.

fsspec and the store's package send the files. A file counts as copied when the store reports its size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout, StepLayout, safe
from stepscope.files.mirror import Copied, MirrorRecord, files_below, is_copied, record_of, write_record
from stepscope.files.run import RunRecord
from stepscope.files.storage.reading import read_record

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_RECORD_EVERY_S = 2.0
_MOST_FAILURES = 3
"""Of one step. The store is away then, and the other files are not tried."""


class StepCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of copying one step."""

    step: StepLayout
    files: int
    sent: int
    """Files that were not in the store yet."""
    sent_bytes: int
    failed: Mapping[str, str]
    """Files that are not in the store, and why."""


class Store(NamedTuple):
    """A folder in a file system of fsspec."""

    url: str
    files: AbstractFileSystem
    root: str

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the files below a folder with their sizes."""
        below = self.files._strip_protocol(f"{self.root}/{folder}")
        listing = self.files.find(below, detail=True)
        return {name[len(below) + 1 :]: info.get("size") for name, info in listing.items()}

    def put(self, file: Path, name: str) -> int:
        """Copy a file and return its size.

        Raises:
            OSError: It changed meanwhile, or the store reports another size. Packages of stores raise more.
        """
        from fsspec.asyn import AsyncFileSystem  # import time: fsspec is in the extra `mirror`

        before, target = file.lstat(), f"{self.root}/{name}"
        if not isinstance(self.files, AsyncFileSystem):  # object stores have no folders: s3fs makes a bucket
            self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(file), target)
        size, after = self.files.size(target), file.lstat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise OSError("it changed while it was copied")
        if size != after.st_size:
            raise OSError(f"the store has {size} of {after.st_size} bytes")
        return after.st_size


def open_store(url: str) -> Store:
    """Return the store that a URL names.

    Raises:
        ConfigError: fsspec, or the package for this kind of URL, is not installed.
    """
    allowed = "a URL of a store that fsspec writes to"
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError("finish.mirror", url, allowed, "pip install 'stepscope[mirror]'") from None
    try:
        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ConfigError("finish.mirror", url, allowed, str(error)) from None
    return Store(url, files, root.rstrip("/"))


def copy_step(store: Store, step: StepLayout) -> StepCopy:
    """Copy the files of a step that are not in the store yet. The answer names those that failed.

    Raises:
        OSError: The step's folder cannot be read, or written.
    """
    files, copied = files_below(step.root), record_of(step, gethostname(), store.url).files
    failed: dict[str, str] = {}
    sizes = _sizes(store, step.root.name, files, failed)
    whole = {
        path: copied[path]
        for path, status in files.items()
        if is_copied(copied.get(path), status) and (sizes is None or sizes.get(path) == status.st_size)
    }
    missing = [] if sizes is None else [path for path in files if path not in whole]
    sent = _send(store, step, missing, whole, failed)
    _record(store, step, whole, failed)
    if not failed:
        record = step.mirror_record(gethostname())
        _put(store, record, f"{step.root.name}/{record.name}", failed)
    return StepCopy(
        step=step,
        files=len(files),
        sent=len(sent),
        sent_bytes=sum(whole[path].size_bytes for path in sent),
        failed=failed,
    )


def _send(
    store: Store, step: StepLayout, paths: list[str], whole: dict[str, Copied], failed: dict[str, str]
) -> list[str]:
    """Copy files, add them to `whole` or `failed`, and return those that were copied."""
    sent, recorded = [], time.monotonic()
    for path in paths:
        file = step.root / path
        if len(failed) >= _MOST_FAILURES:
            failed.setdefault(path, f"not tried after {_MOST_FAILURES} failures")
            continue
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue  # removed or renamed meanwhile
        if _put(store, file, f"{step.root.name}/{path}", failed, path):
            whole[path] = Copied(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
            sent.append(path)
        if time.monotonic() - recorded > _RECORD_EVERY_S:  # a killed program goes on from here
            _record(store, step, whole, failed)
            recorded = time.monotonic()
    return sent


def _put(store: Store, file: Path, name: str, failed: dict[str, str], path: str | None = None) -> bool:
    """Copy a file, or note the failure under `path`, and return whether it was copied."""
    try:
        store.put(file, name)
    except Exception as error:
        if file.exists():
            failed[path or name] = _text_of(error)
        return False
    return True


def _record(store: Store, step: StepLayout, whole: dict[str, Copied], failed: dict[str, str]) -> None:
    write_record(step, gethostname(), MirrorRecord(url=store.url, files=whole, failed=failed))


def copy_run_records(store: Store, run: RunLayout) -> dict[str, str]:
    """Copy the records beside the steps, such as `run.json`, `oom/` and `uncaptured/`.

    Returns:
        Files that could not be copied, and why.
    """
    failed: dict[str, str] = {}
    for file in run.runs():
        _put(store, file, _name_in_mirror(file), failed)
    for files in (sorted(run.oom.glob("[!.]*")), run.uncaptured_files()):  # written once, or only growing
        names = {f"{file.parent.name}/{file.name}": file for file in files}
        sizes = _sizes(store, files[0].parent.name, names, failed) if files else {}
        for name, file in names.items():
            if sizes is not None and sizes.get(file.name) != file.stat().st_size:
                _put(store, file, name, failed)
    return failed


def _name_in_mirror(run_record: Path) -> str:
    """Return a name with the run's id: a further run in the same mirror may have a `run.json` too."""
    try:
        return f"run_{safe(read_record(run_record, RunRecord).run_id)}.json"
    except (OSError, RecordError):
        return run_record.name


def _sizes(
    store: Store, folder: str, names: Iterable[str], failed: dict[str, str]
) -> dict[str, int | None] | None:
    """Return the sizes of a folder's files in the store; None if it cannot be asked: `names` have failed."""
    try:
        return store.sizes(folder)
    except FileNotFoundError:  # nothing yet
        return {}
    except Exception as error:  # packages of stores raise what they like
        failed.update(dict.fromkeys(names, _text_of(error)))
        return None


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
