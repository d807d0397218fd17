"""Rows of `stepscope doctor`: parts of this machine that work, parts that do not, and the fix.

Packages add rows through the entry-point group `stepscope.doctor`. An entry is a function without arguments
that returns a list of `Row`. If the function raises an error, `stepscope doctor` shows it as a red row.

This module has the class `Row`, and the rows on Python, this project's packages, and folders.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

import stepscope
from stepscope.config import ProfileConfig, check_save_path
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope_report.formatting import size

State: TypeAlias = Literal["green", "amber", "red", "absent"]
"""`green`: works. `amber`: works, with a remark. `red`: will not work. `absent`: not installed and not needed
here."""
_LONGEST = 1000
"""Number of characters at which the text of a row is cut."""


def _shown(text: str) -> str:
    """Return the text as one printable line of limited length."""
    line = " ".join(text.split())
    clean = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `stepscope doctor`."""

    subject: str
    """The examined part, such as `torch` or `disk`."""
    state: State
    found: str
    """Finding, with its numbers."""
    fix: str | None = None
    """The remedy. None if the row needs no remedy; every red row has one."""

    def __post_init__(self) -> None:
        for field in ("subject", "found", "fix"):
            text = getattr(self, field)
            if text is not None:
                msgspec.structs.force_setattr(self, field, _shown(text))
        if self.state == "red" and not self.fix:
            raise ValueError(f"the red row {self.subject!r} needs a fix")


def green(subject: str, finding: str) -> Row:
    return Row(subject=subject, state="green", found=finding)


def amber(subject: str, finding: str, fix: str) -> Row:
    return Row(subject=subject, state="amber", found=finding, fix=fix)


def red(subject: str, finding: str, fix: str) -> Row:
    return Row(subject=subject, state="red", found=finding, fix=fix)


def absent(subject: str, finding: str) -> Row:
    return Row(subject=subject, state="absent", found=finding)


OURS = (
    "stepscope",
    "stepscope-report",
    "stepscope-rollout-vllm",
    "stepscope-rollout-sglang",
    "stepscope-npu",
)
LEAST = 10**9
"""Number of free bytes below which a disk is nearly full."""
SHARED_MEMORY = "/dev/shm"
DAMAGED = "damaged"


def python() -> Row:
    return green("python", f"{sys.version.split()[0]}, {sys.executable}")


def own_packages() -> Row:
    """Return a row on stepscope's distributions, which must all have the same version."""
    versions = {name: version for name in OURS if (version := installed(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none is installed"
    listed += f"; used from {Path(str(stepscope.__file__)).parent}"
    if not versions:
        fix = "pip install stepscope, or `pip install -e packages/core -e packages/report` in a checkout"
        return red("stepscope", listed, fix)
    if len(set(versions.values())) > 1:
        wanted = versions.get("stepscope") or max(versions.values())
        names = " ".join(f"{name}=={wanted}" for name in versions)
        return red("stepscope", listed, f"pip install {names}")
    if switch.DISABLED:
        disabled = f"{listed}; {switch.VARIABLE} is set, so nothing is recorded"
        return amber("stepscope", disabled, f"unset {switch.VARIABLE}")
    return green("stepscope", listed)


def damaged_packages() -> Iterator[Row]:
    """Yield a row for each package with unreadable metadata. Adapters and backends are found through
    metadata.
    """
    for distribution in metadata.distributions():
        try:
            name = distribution.metadata["Name"]
            list(distribution.entry_points)
            if name and distribution.version:
                continue
            why = "it has no name or no version"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        where = getattr(distribution, "_path", None)
        finding = f"the metadata of an installed package is damaged: {where or distribution!r}: {why}"
        yield red("packages", finding, "remove that folder and install the package again")


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of all packages with readable metadata. `importlib.metadata` itself would stop
    at the first package with unreadable metadata.
    """
    try:
        return list(metadata.entry_points(group=group))
    except Exception:
        return [
            point
            for distribution in metadata.distributions()
            for point in _points(distribution)
            if point.group == group
        ]


def _points(distribution: metadata.Distribution) -> list[metadata.EntryPoint]:
    try:
        return list(distribution.entry_points)
    except Exception:
        return []


def plug_ins() -> Iterator[Row]:
    """Yield a row for each third-party package that adds parts to stepscope. The parts are loaded as a
    test.
    """
    for distribution in metadata.distributions():
        points = [point for point in _points(distribution) if point.group.startswith("stepscope.")]
        name = _name(distribution) if points else None
        if name is not None and name not in OURS:
            listed = ", ".join(f"{point.name} ({point.group})" for point in points)
            failures = list(filter(None, map(_failure_to_load, points)))
            if failures:
                fix = f"install {name} again, or remove it"
                yield red(name, f"{listed}; cannot be loaded: {'; '.join(failures)}", fix)
            else:
                yield green(name, f"{distribution.version}: {listed}")


def _name(distribution: metadata.Distribution) -> str | None:
    """Return the name of a package, or None if its metadata is damaged."""
    try:
        return distribution.name or None
    except Exception:
        return None


def _failure_to_load(point: metadata.EntryPoint) -> str | None:
    try:
        point.load()
    except Exception as error:
        return f"{point.name}: {type(error).__name__}: {error}"
    return None


def configuration(config: ProfileConfig | ConfigError) -> Iterator[Row]:
    """Yield a row for a valid configuration, or a row for each error in it."""
    if isinstance(config, ConfigError):
        for error in (config, *config.also):
            finding = f"{error.field} is {error.value!r}; allowed: {error.allowed}"
            yield red("configuration", finding, error.fix)
    elif config.steps:
        steps = ", ".join(str(spec.spelled) for spec in config.steps)
        yield green("configuration", f"valid: {config.tool}, steps {steps}")
    else:
        fix = 'set steps: [2, "10:50:10"] in the file that STEPSCOPE_CONFIG names, or STEPSCOPE_STEPS=2'
        yield amber("configuration", "valid; steps selects nothing", fix)


def save_path(config: ProfileConfig | None) -> Row:
    """Return a row on the run's folder: whether it can be written, and its free space.

    Args:
        config: None if the configuration has errors, so that the folder is unknown.
    """
    if config is None:
        return amber("save_path", "not checked: the configuration is wrong", "correct it: see above")
    try:
        check_save_path(config, on_ray=False)
    except ConfigError as error:
        return red("save_path", f"{config.save_path}: {error.allowed}", error.fix)
    folder = Path(config.save_path).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    finding = f"{config.save_path} is writable, {size(free)} free"
    allowed = config.budget.trace_mb << 20
    if free < allowed:
        fix = "free some, choose another save_path, or set a smaller budget.trace_mb"
        finding += f"; one process may write {size(allowed)} per capture (budget.trace_mb)"
        return (red if free < LEAST else amber)("save_path", finding, fix)
    return green("save_path", finding)


def shared_memory() -> Row:
    """Return a row on /dev/shm, which Ray's object store and the workers of engines use."""
    where = SHARED_MEMORY
    try:
        usage = shutil.disk_usage(where)
        writable = os.access(where, os.W_OK | os.X_OK) and os.path.isdir(where)
    except FileNotFoundError:
        if sys.platform != "linux":
            return absent(where, "not on this system")
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`); in a container: --shm-size=16g"
        finding = "not there: Ray falls back to the disk, and engines fail to start"
        return amber(where, finding, fix)
    except OSError as error:
        fix = "make it a tmpfs that all users can write to: mode 1777"
        return amber(where, f"cannot be examined: {error}", fix)
    if not writable:
        fix = "make it writable for all users: chmod 1777 /dev/shm"
        return red(where, "this user cannot write there", fix)
    finding = f"{size(usage.free)} of {size(usage.total)} free"
    if usage.free < LEAST:
        fix = (
            "docker run --shm-size=16g (or --ipc=host); Ray falls back to the disk, and engines fail to start"
        )
        return amber(where, finding, fix)
    return green(where, finding)


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution; "damaged" if its metadata has none; None if it is not
    installed.
    """
    try:
        return metadata.version(distribution) or DAMAGED
    except metadata.PackageNotFoundError:
        return None
    except Exception:
        return DAMAGED


def damaged(distribution: str) -> Row:
    fix = f"pip install --force-reinstall {distribution}"
    return red(distribution, "installed, and its metadata names no version", fix)
