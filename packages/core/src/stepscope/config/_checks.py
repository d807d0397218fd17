"""Checks of this machine before the run: is the folder writable, and is the tool installed?"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from stepscope.config._fields import closest
from stepscope.config._instrument import own_program
from stepscope.config._profile import ProfileConfig
from stepscope.errors import ConfigError, ours

INSTALL_TORCH_NPU = "pip install torch-npu (the one for your torch and CANN), or tool: torch"


def check_save_path(config: ProfileConfig, *, on_ray: bool) -> None:
    """Make sure that this process can write `save_path`, by writing a file and removing it.

    Raises:
        ConfigError: the folder cannot be written, or the path is relative and the run is on Ray.
    """
    path = Path(config.save_path)
    if on_ray and not path.is_absolute():
        allowed = "an absolute path on Ray, where each worker has a working directory of its own"
        raise ConfigError("save_path", config.save_path, allowed, f"write save_path: {path.absolute()}")
    try:
        _try_to_write(path.absolute())
    except ours(OSError) as error:
        allowed = f"a folder that this process can write to ({error.strerror})"
        fix = "choose another folder, or change what stands in its way"
        raise ConfigError("save_path", config.save_path, allowed, fix) from None


def check_tool(config: ProfileConfig) -> None:
    """Make sure that a backend is registered under the name `tool`, without loading the backend.

    Raises:
        ConfigError: no such backend is registered. The error names the registered ones, and how to add one.
    """
    from importlib.metadata import entry_points  # imported here: 15 ms, once per run

    installed = sorted({point.name for point in entry_points(group="stepscope.backends")})
    if config.tool not in installed:
        allowed = f"an installed backend: {', '.join(installed) or 'there is none'}"
        raise ConfigError("tool", config.tool, allowed, _how_to_add(config.tool, installed))


_PACKAGES = {
    "torch": "stepscope",  # stepscope itself must be installed: sources on sys.path register no entry points
    "cuda_memory": "stepscope",
    "nsys": "stepscope",
    "npu": "'stepscope[npu]'",
}
"""{backend of stepscope: the package that contains it}."""


def _how_to_add(tool: str, installed: Sequence[str]) -> str:
    if tool in _PACKAGES:
        return f"pip install {_PACKAGES[tool]}"
    near = closest(tool, {*installed, *_PACKAGES})
    meant = f"did you mean {near!r}? If not, " if near else ""
    return f"{meant}install the package whose entry points `stepscope.backends` name {tool!r}"


def check_program(config: ProfileConfig, command: Sequence[str]) -> None:
    """Make sure that no `instrument` entry names the program of `command`. Such an entry would have no
    effect, because Python runs the program as `__main__` and never imports it.

    Raises:
        ConfigError: an entry names the program.
    """
    words = list(command)
    script = next((word for word in words if word.endswith(".py")), None)
    named = {} if script is None else {Path(script).stem: Path(script).name}
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        named[module] = f"python -m {module}"
    for entry in config.instrument:
        if entry.module in named:
            raise own_program(entry.module, named[entry.module])


def check_recorder(config: ProfileConfig) -> None:
    """Make sure that the program or package behind `tool` (nsys, torch_npu) is installed on this machine.
    Call this where work is recorded, because a driver may lack the program.

    Raises:
        ConfigError: the program or package is not installed. The error names what to install.
    """
    import shutil

    if config.tool == "nsys" and shutil.which("nsys") is None:
        fix = "install Nsight Systems and put `nsys` on PATH, on every node"
        raise ConfigError("tool", config.tool, "a tool that is installed here; nsys is not on PATH", fix)
    if config.tool == "npu" and not _there("torch_npu"):
        raise ConfigError(
            "tool", config.tool, "a tool that is installed here; torch_npu is not", INSTALL_TORCH_NPU
        )


def check_finish(config: ProfileConfig) -> None:
    """Make sure that the packages for `finish.report_to` are installed, without importing them.

    Raises:
        ConfigError: a package is not installed. The error names what to install.
    """
    for name in config.finish.report_to:
        _check_writer(name)


WRITERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
"""{name of a writer in `stepscope.writers`: the module that it needs}."""


def _check_writer(name: str) -> None:
    from importlib.metadata import entry_points

    if not _there("stepscope_report"):
        allowed = "a writer, if stepscope-report is installed, which computes the figures; it is not"
        fix = f"pip install 'stepscope[{name if name in WRITERS else 'cli'}]'"
        raise ConfigError("finish.report_to", name, allowed, fix)
    if name not in WRITERS:
        known = sorted({*WRITERS, *(point.name for point in entry_points(group="stepscope.writers"))})
        if name not in known:
            near = closest(name, known)
            fix = f"did you mean {near!r}?" if near else "install the package that brings it"
            raise ConfigError("finish.report_to", name, f"a writer: {', '.join(known)}", fix)
    elif not _there(module := WRITERS[name]):
        allowed = f"a writer whose package is installed; {module} is not"
        raise ConfigError("finish.report_to", name, allowed, f"pip install 'stepscope[{name}]'")


def _there(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package of `module` is missing
        return False


def _try_to_write(folder: Path) -> None:
    """Write a file in `folder`; if `folder` does not exist, in a temporary folder in its nearest existing
    parent.

    `folder` itself is not created. Several processes may check it at the same time, and one would remove it
    while another still uses it.
    """
    import shutil  # imported here: with tempfile this takes 8 ms, once per run
    import tempfile

    nearest = _nearest(folder)
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
    if nearest == folder:
        _write(nearest)
    else:
        # Not TemporaryDirectory, because it registers a `weakref.finalize`. All finalizers of the process
        # would then run after multiprocessing's wait for its children at exit (if multiprocessing is imported
        # later), and the finalizer that ends a vLLM engine would come too late.
        passing = tempfile.mkdtemp(prefix=".stepscope-", dir=nearest)
        try:
            _write(passing)
        finally:
            shutil.rmtree(passing, ignore_errors=True)


def _write(folder: str | os.PathLike[str]) -> None:
    # Not a file object: if a full disk keeps a file object from closing, Python prints a traceback when it is
    # deleted.
    path = os.path.join(folder, f".stepscope-{os.getpid()}-{os.urandom(6).hex()}")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            os.write(handle, b"stepscope")  # not an empty file, which fits on a full disk
        finally:
            os.close(handle)  # a network disk may report only here that it is full
    finally:
        os.unlink(path)


def _nearest(path: Path) -> Path:
    """Return `path` if it exists, else its nearest existing parent."""
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
        except FileNotFoundError:
            continue
        return candidate
    raise FileNotFoundError(errno.ENOENT, "no folder above it exists")
