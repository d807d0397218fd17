"""Download wheels for a machine without a network, and install them there into a folder."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tools.repository import ROOT

CORE = (
    "msgspec>=0.19",
    "pyyaml>=6.0.2",
    "wrapt>=1.17",
    "isal>=1.7",
    "typer>=0.19.2",
    "rich>=13",
    "stringzilla>=5",
)
"""Requirements of stepscope and stepscope-report."""
TESTS = ("pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2.4", "hypothesis>=6.100", "hatchling>=1.27")
OLD_PYTHON = ("tomli", "exceptiongroup", "backports.asyncio.runner")
"""Dependencies of `TESTS` on Python 3.10. They are listed because pip reads conditions such as
`python_version < "3.11"` for its own Python, even if it downloads for another."""
BESIDE_TORCH = ("nvidia-ml-py>=12.535", "nvtx>=0.2.11", "numpy>=2")
"""Packages that a machine with torch often has. They are installed only if they are absent."""
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
"""Minor versions of glibc in the tags of wheels. pip accepts only the tags that it is given."""


def fill(folder: Path, python: str) -> bool:
    """Download the wheels for Linux and a Python such as `3.12`. Return whether all were found."""
    machine = platform.machine()
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC), f"manylinux2014_{machine}"]
    if machine == "x86_64":
        tags += ["manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    old = OLD_PYTHON if python == "3.10" else ()
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", python, *platforms, "--dest", str(folder)),
        *(*CORE, *TESTS, *BESIDE_TORCH, *old),
    ]
    if subprocess.run(command).returncode:
        return False
    size = sum(file.stat().st_size for file in folder.glob("*.whl")) / 1e6
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels for Python {python}, {size:.0f} MB")
    return True


def install(wheels: Path, target: Path) -> str | None:
    """Install stepscope, stepscope-report and the parts' requirements. Return pip's output if that fails."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index"),
        *(
            "--find-links",
            str(wheels.resolve()),
            "--target",
            str(target),
            "--no-cache-dir",
            "--no-compile",
            "--quiet",
        ),
        *(
            f"{ROOT / 'packages' / 'core'}[cli]",  # before `report`, or old versions of pip search the index
            str(ROOT / "packages" / "report"),
            *TESTS,
            *absent(BESIDE_TORCH),
        ),
    ]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return made.stdout if made.returncode else None


def absent(requirements: Sequence[str]) -> list[str]:
    """Return the requirements whose packages are not installed in any version."""
    return [requirement for requirement in requirements if not _installed(requirement.partition(">=")[0])]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
