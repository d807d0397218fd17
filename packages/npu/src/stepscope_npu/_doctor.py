"""Rows of `stepscope doctor` about Ascend NPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from stepscope_npu._versions import MSPROF_VARIABLES, SOURCE_CANN
from stepscope_report.doctor import Row

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_DEADLINE_S = 60
_PROBE = """
import torch, torch_npu
print(torch_npu.npu.is_available(), torch_npu.npu.device_count(), sep="|")
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of this machine, found without importing torch_npu into this process."""

    torch_npu: str | None
    """Version of torch_npu, or None if it is not installed."""
    autoloads: bool = False
    """True if `import torch` imports torch_npu too."""
    environ: Mapping[str, str] = field(default_factory=dict)
    imported: str | None = None
    """`True|8`: availability and number of NPUs, or None if the import failed."""
    message: str = ""
    """The last line that a failed import printed."""
    cann: Path | None = None
    """Folder of CANN, or None if it was not found."""
    msprof: str | None = None
    msprof_analyze: bool = False


def rows() -> list[Row]:
    """Return the rows about this machine. The entry point in `pyproject.toml` names this function."""
    return rows_of(look())


def rows_of(seen: Seen) -> list[Row]:
    """Return the rows about the state `seen`, without inspecting this machine."""
    if seen.torch_npu is None:
        return [
            Row(subject="torch_npu", state="absent", found="not installed; only `tool: npu` needs it"),
        ]
    findings = [_torch_npu(seen), _cann(seen), _msprof(seen)]
    if seen.autoloads and seen.imported is None and seen.environ.get(_AUTOLOAD) != "0":
        broken = "`import torch` loads torch_npu by itself, and fails with it"
        findings.append(Row(subject=_AUTOLOAD, state="red", found=broken, fix=f"export {_AUTOLOAD}=0"))
    for name in MSPROF_VARIABLES:
        if seen.environ.get(name):
            inert = f"{seen.environ[name]}: msprof profiles this process, and torch_npu's profiler is inert"
            findings.append(Row(subject=name, state="red", found=inert, fix=f"unset {name}"))
    return findings


def _torch_npu(seen: Seen) -> Row:
    if seen.imported is None:
        fix = f"{SOURCE_CANN}; its version has to fit the driver's (npu-smi info) and torch_npu's"
        broken = f"{seen.torch_npu} does not import: {seen.message}"
        return Row(subject="torch_npu", state="red", found=broken, fix=fix)
    available, _, count = seen.imported.partition("|")
    if available != "True":
        fix = "npu-smi info; ASCEND_RT_VISIBLE_DEVICES; does the driver's version fit CANN's?"
        return Row(subject="torch_npu", state="red", found=f"{seen.torch_npu} finds no NPU", fix=fix)
    return Row(subject="torch_npu", state="green", found=f"{seen.torch_npu}, {count} NPU(s)")


def _cann(seen: Seen) -> Row:
    if seen.cann is None:
        return Row(subject="CANN", state="amber", found="ASCEND_HOME_PATH is not set", fix=SOURCE_CANN)
    number = cann_version(seen.cann) or "version unknown"
    return Row(subject="CANN", state="green", found=f"{number}, {seen.cann}")


def _msprof(seen: Seen) -> Row:
    if seen.msprof is None:
        finding = "not on PATH: recordings can be made here, and analysed elsewhere alone"
        return Row(subject="msprof", state="amber", found=finding, fix=SOURCE_CANN)
    further = "with msprof-analyze" if seen.msprof_analyze else "msprof-analyze is not installed (optional)"
    return Row(subject="msprof", state="green", found=f"{seen.msprof}, {further}")


def cann_version(folder: Path) -> str | None:
    """Return the version from one of CANN's own files, or None. Files that torch_npu reads come first."""
    kinds = ("ascend_*_install.info", "*version.info")
    for path in [path for kind in kinds for path in sorted(folder.rglob(kind))[:20]]:
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip().lower() == "version" and value.strip():
                return value.strip()
    return None


def look() -> Seen:
    """Return the state of this machine. A separate process imports torch_npu, since the import may crash."""
    installed = _version("torch-npu")
    if installed is None:
        return Seen(torch_npu=None)
    imported, message = _probe()
    home = os.environ.get("ASCEND_HOME_PATH")
    return Seen(
        torch_npu=installed,
        autoloads=any(point.name == "torch_npu" for point in entry_points(group="torch.backends")),
        environ=dict(os.environ),
        imported=imported,
        message=message,
        cann=Path(home) if home else None,
        msprof=shutil.which("msprof"),
        msprof_analyze=_version("msprof-analyze") is not None,
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _probe() -> tuple[str | None, str]:
    """Import torch_npu in a separate process. Return `available|count` and "", or None and a message."""
    env = {**os.environ, _AUTOLOAD: "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {_DEADLINE_S} s"
    last_line = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    if done.returncode:
        return None, last_line[0] if last_line else f"exit code {done.returncode}"
    return done.stdout.strip().splitlines()[-1], ""
