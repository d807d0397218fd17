"""A folder in a store that fsspec knows: files are put there and compared, with retries."""

from __future__ import annotations

import base64
import hashlib
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.errors import ConfigError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
ATTEMPTS = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
BLOCK = 1 << 20
_WITH_FOLDERS = frozenset(
    ("file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "webdav", "dav")
)
"""Stores in which a folder is made before a file. In object stores there are none, and asking for one makes
the bucket.
"""


class FileChangedError(Exception):
    """A file became another while it was copied."""

    def __str__(self) -> str:
        return "it changed while it was copied"


_FINAL = (
    FileChangedError,
    PermissionError,
    FileNotFoundError,  # no such bucket, or the file is gone here
    NotADirectoryError,
    IsADirectoryError,
    FileExistsError,
    NotImplementedError,
)
"""Errors that another attempt does not mend."""


def open_store(url: str) -> Store:
    """The store that a URL means.

    Raises:
        ConfigError: fsspec, or the package for this kind of URL, is not installed.
    """
    allowed = "a URL of a store that fsspec writes to"
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError("finish.mirror", url, allowed, "pip install 'stepscope[mirror]'") from None
    local = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    try:
        # Listings must not be remembered: what a lost connection left there is to be seen.
        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **local)
    except (ImportError, ValueError) as error:
        raise ConfigError("finish.mirror", url, allowed, str(error)) from None
    return Store(files, root)


class Store:
    """Its paths are relative to the URL. One thread's."""

    def __init__(
        self, files: AbstractFileSystem, root: str, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._sleep = sleep
        self._attempts = ATTEMPTS
        protocol = files.protocol
        self._has_folders = not _WITH_FOLDERS.isdisjoint(
            (protocol,) if isinstance(protocol, str) else protocol
        )

    def listing(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """What lies below `folder`, by path relative to it, as the store describes it."""
        below = f"{self._root}/{folder}".rstrip("/")

        def look() -> dict[str, Mapping[str, Any]]:
            try:
                found = self._files.find(below, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._files._strip_protocol(below)) + 1
            return {name[start:]: info for name, info in found.items()}

        return self._persistently(look)

    def read(self, path: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            return bytes(self._persistently(lambda: self._files.cat_file(f"{self._root}/{path}")))
        except FileNotFoundError:
            return None

    def put(self, file: Path, path: str, md5: str) -> None:
        """Copies a file and compares the copy with it.

        Raises:
            FileChangedError: it is not what it was when `md5` was taken.
            OSError, or what the store's package raises: it could not be copied, or the copy differs.
        """
        there = f"{self._root}/{path}"

        def copy() -> None:
            if self._has_folders:
                self._files.makedirs(there.rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(file), there)
            info = self._files.info(there)
            if not self.is_copy(path, info, size_bytes=file.stat().st_size, md5=md5):
                if md5_of(file) != md5:
                    raise FileChangedError
                raise OSError(f"the copy is not what was sent: {info.get('size')} bytes")

        self._persistently(copy)

    def is_copy(self, path: str, info: Mapping[str, Any], *, size_bytes: int, md5: str) -> bool:
        """Whether the store holds this content: by the checksum that it states, else by reading it back."""
        if info.get("size") != size_bytes:
            return False
        if md5 in _stated(info):
            return True
        digest = hashlib.md5(usedforsecurity=False)
        with self._files.open(f"{self._root}/{path}", "rb") as back:
            while block := back.read(BLOCK):
                digest.update(block)
        return digest.hexdigest() == md5

    def _persistently(self, work: Callable[[], T]) -> T:
        """The outcome of `work`, tried again with growing pauses."""
        attempt = 0
        while True:
            attempt += 1
            try:
                done = work()
            except _FINAL:
                raise
            except Exception:
                if attempt >= self._attempts:
                    self._attempts = 1  # a store that is away costs the patience for one file
                    raise
                longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
                self._sleep(longest * random.uniform(0.5, 1))
            else:
                self._attempts = ATTEMPTS
                return done


def _stated(info: Mapping[str, Any]) -> set[str]:
    """The MD5s, in hex, that stores give with a file; S3's ETag is one unless it came in parts."""
    stated = {str(info.get(name, "")).strip('"').lower() for name in ("ETag", "etag", "md5")}
    settings = info.get("content_settings")
    coded = (info.get("md5Hash"), settings.get("content_md5") if isinstance(settings, Mapping) else None)
    for value in coded:
        if isinstance(value, str):
            stated.add(base64.b64decode(value).hex())
        elif isinstance(value, bytes | bytearray):
            stated.add(bytes(value).hex())
    return stated


def md5_of(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
