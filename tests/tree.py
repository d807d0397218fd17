"""Contents of the repository: the files of git, the distributions, and their imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages" / "core"
REPORT = ROOT / "packages" / "report"
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
ADAPTERS = [path for path in PACKAGES if path not in (CORE, REPORT)]


@cache
def files(*suffixes: str) -> list[Path]:
    """Files of the repository with one of `suffixes` (all without), those not yet added to git included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive has no git
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in str(path)]
    paths = [ROOT / name for name in names if name and (not suffixes or name.endswith(suffixes))]
    return [path for path in paths if path.is_file()]


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomli.loads((package / "pyproject.toml").read_text())["project"]
    return table


class Import(NamedTuple):
    """`module` imports `target` (a module, or a name in one) in line `line` of `file`."""

    module: str
    target: str
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.target}"


@cache
def imports(package: Path) -> tuple[Import, ...]:
    """Return all imports in the sources of a distribution, also in functions and under `TYPE_CHECKING`."""
    return tuple(_imports(package / "src"))


def _imports(source: Path) -> Iterator[Import]:
    for file in sorted(source.rglob("*.py")):
        module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in targets(node):
                    yield Import(module, target, file, node.lineno)


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    assert not node.level, "imports here are absolute"
    return [f"{node.module}.{name.name}" for name in node.names]
