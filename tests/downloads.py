"""Packages whose source the tests read, never installed: fetched once, unpacked, kept in `.downloads`."""

from __future__ import annotations

import fcntl
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import Buffer

from tests.tree import ROOT

FOLDER = ROOT / ".downloads"
SOURCE_ALONE = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python")
"""Words for pip: what is only read may be for another Python than this one."""


def wheel(requirement: str, *options: str) -> Path:
    """Return the folder with the unpacked wheel of `name==version`, from whichever index pip is set to.

    `options` go to `pip download`, for a wheel of another Python or platform:
    `--python-version 3.9 --platform manylinux2014_aarch64`. Where it cannot be had the test is skipped with
    the last line that pip printed.
    """
    folder = FOLDER / requirement.replace("==", "-")
    with locked(folder):
        if not (folder / ".complete").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", *SOURCE_ALONE]
            done = subprocess.run(
                [*command, "--dest", str(folder), *options, requirement], capture_output=True, text=True
            )
            if done.returncode:
                pytest.skip(f"cannot download {requirement}: {done.stderr.strip().splitlines()[-1]}")
            for archive in folder.glob("*.whl"):
                zipfile.ZipFile(archive).extractall(folder)
                archive.unlink()
            (folder / ".complete").touch()
    return folder


def members(requirement: str, names: Sequence[str], *options: str) -> Path:
    """Return a folder with these files of the wheel of `name==version`, of those that it has.

    For wheels of hundreds of megabytes: only these files and the wheel's list of files are fetched. `options`
    as for `wheel`. Where they cannot be had the test is skipped with the reason.
    """
    folder = FOLDER / f"{requirement.replace('==', '-')}-members"
    done = folder / ".complete"
    with locked(folder):
        if not done.exists() or not set(names) <= set(done.read_text().splitlines()):
            try:
                _fetch(_address(requirement, *options), names, folder)
            except OSError as error:
                pytest.skip(f"cannot read in the wheel of {requirement}: {error}")
            done.write_text("\n".join(names))
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other test processes out of it: several run side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _address(requirement: str, *options: str) -> str:
    """Return the wheel's address by pip. Raise OSError with the last line of its output."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += [*SOURCE_ALONE, "--report", "-", "--target", str(FOLDER / "nowhere"), *options]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1])
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return str(report["install"][0]["download_info"]["url"])


def _fetch(url: str, names: Sequence[str], folder: Path) -> None:
    with zipfile.ZipFile(io.BufferedReader(Ranges(url), 1 << 18)) as archive:
        for name in set(names) & set(archive.namelist()):
            archive.extract(name, folder)


class Ranges(io.RawIOBase):
    """A file behind HTTP. Only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        asked = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            if answer.status != 206:
                raise OSError("the index sends files whole or not at all")
            data = answer.read()
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
