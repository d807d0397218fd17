"""Python, our own packages, and the folders that captures write to."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from stepscope.config import ProfileConfig, check_save_path
from stepscope.doctor.rows import Row
from stepscope.errors import ConfigError

OLDEST_PYTHON = (3, 10)
OURS = ("stepscope", "stepscope-rollout-vllm", "stepscope-rollout-sglang", "stepscope-npu")
GIB = 1 << 30


def python() -> Row:
    version = sys.version.split()[0]
    if sys.version_info < OLDEST_PYTHON:
        return Row(subject="python", state="red", found=version, fix="use Python 3.10 or newer")
    return Row(subject="python", state="green", found=f"{version}, {sys.executable}")


def own_packages() -> Row:
    """stepscope's distributions: they work together in one version."""
    found = {name: version for name in OURS if (version := installed(name)) is not None}
    said = ", ".join(f"{name} {version}" for name, version in found.items()) or "none is installed"
    if not found:
        fix = "pip install stepscope, or `pip install -e packages/core` in a checkout"
        return Row(subject="stepscope", state="red", found=said, fix=fix)
    if len(set(found.values())) > 1:
        names = " ".join(f"{name}=={found['stepscope']}" for name in found)
        return Row(subject="stepscope", state="red", found=said, fix=f"pip install {names}")
    return Row(subject="stepscope", state="green", found=said)


def configuration(config: ProfileConfig | ConfigError) -> Row:
    """What the environment, or the file that was named, says."""
    if isinstance(config, ConfigError):
        found = f"{config.field} is {config.value!r}; allowed: {config.allowed}"
        return Row(subject="configuration", state="red", found=found, fix=config.fix)
    if not config.steps:
        fix = 'set steps: [2, "10:50:10"] in the file that STEPSCOPE_CONFIG names, or STEPSCOPE_STEPS=2'
        return Row(subject="configuration", state="amber", found="valid; steps selects nothing", fix=fix)
    steps = ", ".join(str(spec.spelled) for spec in config.steps)
    return Row(subject="configuration", state="green", found=f"valid: {config.tool}, steps {steps}")


def save_path(config: ProfileConfig) -> Row:
    """Whether the run's folder can be written, and what fits into it."""
    try:
        check_save_path(config, on_ray=False)
    except ConfigError as error:
        return Row(
            subject="save_path", state="red", found=f"{config.save_path}: {error.allowed}", fix=error.fix
        )
    there = next(
        path
        for path in (Path(config.save_path).absolute(), *Path(config.save_path).absolute().parents)
        if path.exists()
    )
    free = shutil.disk_usage(there).free
    found = f"{config.save_path} is writable, {free / GIB:.1f} GiB free"
    allowed = config.budget.trace_mb << 20
    if free < allowed:
        fix = "free some, choose another save_path, or set a smaller budget.trace_mb"
        found += f"; one process may write {allowed / GIB:.1f} GiB per capture (budget.trace_mb)"
        return Row(subject="save_path", state="red" if free < GIB else "amber", found=found, fix=fix)
    return Row(subject="save_path", state="green", found=found)


def shared_memory() -> Row:
    """/dev/shm, which Ray's object store and the engines' workers live in."""
    where = "/dev/shm"
    if not os.path.isdir(where):
        return Row(subject=where, state="absent", found="not on this system")
    usage = shutil.disk_usage(where)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < GIB:
        fix = (
            "docker run --shm-size=16g (or --ipc=host); Ray falls back to the disk, and engines fail to start"
        )
        return Row(subject=where, state="amber", found=found, fix=fix)
    return Row(subject=where, state="green", found=found)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
