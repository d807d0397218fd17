"""Virtual environments of this checkout. Each is made once; later uses check it in milliseconds."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import processes, repository
from tools.processes import say, succeeds

EXTRAS = {"core": "[cli]"}


# (pattern in the output of a failed command, its meaning). The first that matches is shown.
ADVICE = (
    (
        r"No matching distribution found for torch==\S+\+cpu",
        "the index has no CPU build of that torch: see PIP_EXTRA_INDEX_URL in CONTRIBUTING.md",
    ),
    (r"No space left|Errno 28", "the disk is full (3 GB are needed, 8 GB with the CUDA build of torch)"),
    (r"No matching distribution found for torch", "there is no such torch for this Python: use 3.10 to 3.14"),
    (
        r"ConnectionError|ConnectTimeout|ReadTimeout|NewConnection|name resolution|SSLError|ProxyError",
        "the package index cannot be reached: check the network, and proxy and index in `pip config list`",
    ),
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment: dependency groups of pyproject.toml and the five packages, editable."""

    folder: Path
    groups: tuple[str, ...]
    bare: str | None = None
    """A file of requirements to install without their dependencies."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    """The Python that makes the environment. It is outside any virtual environment, which may be rebuilt."""
    gigabytes: float = 3

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def stamp(self) -> Path:
        """The file with the fingerprint of the installed packages. Absent until a set-up has succeeded."""
        return self.folder / ".stepscope-ready"

    @property
    def unfinished(self) -> Path:
        """A file that exists during a set-up. Found at the start, it means that a set-up was killed."""
        return self.folder.with_name(f"{self.folder.name}-unfinished")

    def ready(self) -> str:
        """Make or update the environment if necessary, and return its Python. Exit with a fix on failure."""
        if not self.is_current():
            with lock():
                if not self.is_current():  # another dev.py may have built it meanwhile
                    self.build()
        return self.python

    def torch_built_for(self) -> str | None:
        """Return the CUDA version of the installed torch, or None for a CPU build or without torch."""
        for file in self.folder.glob("lib/python3*/site-packages/torch/version.py"):
            if match := re.search(r"^cuda\b.*= '([^']+)'", file.read_text(), re.MULTILINE):
                return match[1]
        return None

    def is_current(self) -> bool:
        try:
            installed = os.path.exists(self.python) and self.stamp.read_text() == self.fingerprint()
            return installed and not self.is_touched()
        except OSError:
            return False

    def is_touched(self) -> bool:
        """Return whether packages were added or removed since the set-up, for example by `uv sync`."""
        finished = self.stamp.stat().st_mtime_ns
        folders = self.folder.glob("lib/python3*/site-packages")
        return any(folder.stat().st_mtime_ns > finished for folder in folders)

    def fingerprint(self) -> str:
        """Return a digest of requirements, the checkout's folder (for editable installs) and the Python."""
        digest = hashlib.sha256(repr((str(repository.ROOT), self.groups)).encode())
        digest.update((self.folder / "pyvenv.cfg").read_bytes())
        for file in (repository.ROOT / "pyproject.toml", *repository.MANIFESTS):
            # The [tool] tables come last in these files, and do not affect the installation.
            digest.update(file.read_text().split("\n[tool.")[0].encode())
        if self.bare:
            digest.update((repository.ROOT / self.bare).read_bytes())
        return digest.hexdigest()

    def build(self) -> None:
        usable = self.usable()
        check_disk(1 if usable else self.gigabytes)
        if usable:
            say(f"updating {self.folder.name}")
        else:
            say(f"setting up {self.folder.name}: some minutes and {self.gigabytes:g} GB, once")
            if sys.platform == "linux" and self.gigabytes > 2:
                say("(6 GB with the CUDA build of torch; CONTRIBUTING.md says how pip finds the CPU build)")
        if not usable:
            check_venv_module()
        self.unfinished.touch()
        self.stamp.unlink(missing_ok=True)
        if not usable:
            self.narrate("virtual environment", [self.base, "-m", "venv", "--clear", str(self.folder)])
        # 25.1 is the first pip with --group; 24.1 the first with raw progress
        self.pip("pip", "--upgrade", "pip>=25.1")
        self.fill()
        self.unfinished.unlink()
        self.stamp.write_text(self.fingerprint())

    def fill(self) -> None:
        editable = [
            word
            for name in repository.PACKAGES
            for word in ("--editable", f"packages/{name}{EXTRAS.get(name, '')}")
        ]
        groups = [word for name in self.groups for word in ("--group", name)]
        self.pip("packages", "--progress-bar=raw", *groups, *editable)
        if self.bare:
            self.pip(self.bare, "--progress-bar=raw", "--no-deps", "--requirement", self.bare)

    def usable(self) -> bool:
        """Return whether the folder can be updated. If not, print why."""
        if not self.folder.exists():
            return False
        if self.unfinished.exists():
            say(f"an earlier set-up of {self.folder.name} did not end: starting it afresh")
            return False
        probe = "import pip, sys; sys.exit(sys.version_info < (3, 10))"
        if succeeds([self.python, "-c", probe]):
            return True
        say(f"{self.folder.name} does not work (no pip in it, or its Python is gone): starting it afresh")
        return False

    def pip(self, what: str, *arguments: str) -> None:
        self.narrate(what, [self.python, "-m", "pip", "install", "--disable-pip-version-check", *arguments])

    def narrate(self, what: str, command: Sequence[str]) -> None:
        output = processes.narrate(what, command)
        if output is None:
            return
        # A command that fails cleans up, so the next set-up can update this folder.
        self.unfinished.unlink(missing_ok=True)
        advice = next(
            (f"It looks as if {words}. " for pattern, words in ADVICE if re.search(pattern, output)), ""
        )
        again = " ".join(["python3", *sys.argv])
        sys.exit(
            f"{output}\n\nSetting up {self.folder.name} failed at: {what}. {advice}Then run `{again}` again."
        )


DEV = Environment(repository.ROOT / ".venv", ("dev",))
BENCH = Environment(repository.ROOT / ".venv-bench", ("bench",), bare="benchmarks/peers.txt", gigabytes=4)
RELEASE = Environment(repository.ROOT / ".venv-release", ("release",), gigabytes=0.5)


def check_disk(gigabytes: float) -> None:
    for folder, need in ((repository.ROOT, gigabytes), (Path(tempfile.gettempdir()), 1)):
        free = shutil.disk_usage(folder).free / 1e9
        if free < need:
            sys.exit(
                f"{free:.1f} GB are free at {folder}; setting up needs {need:g} GB there. Fix: free "
                "some, or use a larger disk (clone there; the variable TMPDIR moves temporary files)"
            )


def check_venv_module() -> None:
    absent = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if absent:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        sys.exit(
            f"{sys.executable} has no module {' and '.join(absent)} and cannot make a virtual environment. "
            f"Fix: `sudo apt install {package}` on Debian and Ubuntu; elsewhere a complete Python, "
            "from python.org, pyenv or conda"
        )


@contextmanager
def lock() -> Iterator[None]:
    """Hold a lock on pyproject.toml, so that one set-up runs at a time in this checkout."""
    with open(repository.ROOT / "pyproject.toml", "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another dev.py is setting up here: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
