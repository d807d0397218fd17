"""Packages whose source the tests read, never installed: fetched once, unpacked, kept in `.downloads`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tree import ROOT

FOLDER = ROOT / ".downloads"


def wheel(requirement: str, *options: str) -> Path:
    """The folder with the unpacked wheel of `name==version`, from whichever index pip is set to.

    `options` go to `pip download`, for a wheel of another Python or platform:
    `--python-version 3.9 --platform manylinux2014_aarch64`. Where it cannot be had the test is skipped with
    the last line that pip printed.
    """
    folder = FOLDER / requirement.replace("==", "-")
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
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
