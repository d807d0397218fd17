"""The run this process takes part in: its id, its configuration, its `run.json`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stepscope import switch
from stepscope.config import ProfileConfig, check_finish, check_save_path, check_tool, resolve
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.run import RunRecord
from stepscope.files.storage.atomic import write_atomic
from stepscope.recording.process import failures, sigusr1

_configured: ProfileConfig | None = None
"""What `configure` set, or what the environment says once it was asked. One writer: this module."""
_checked: dict[tuple[int, bool], ProfileConfig] = {}
"""By identity. The configurations are kept: an identity is reused once its object is gone."""
_recorded: set[str] = set()
_ids: dict[str, str] = {}
"""The id of this run, under one key. `dict.setdefault` is atomic: a thread that listens for requests may ask
beside the first capture. One writer: `run_id`.
"""

_NAMED = ("stepscope", "torch", "ray", "torch_npu")


def configure(
    source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None, **settings: object
) -> ProfileConfig:
    """Sets this process' configuration, for every later `capture` that is given none.

    Args:
        source: A YAML or JSON file, or a mapping of the same content; or a ready `ProfileConfig`, which is
            taken exactly as it is. None: the file that STEPSCOPE_CONFIG names, if it does.
        **settings: Fields of `ProfileConfig`. Order of precedence, weakest first: defaults, file, STEPSCOPE_*
            environment variables, these arguments.

    Returns:
        The configuration as resolved.

    Raises:
        ConfigError: A value is wrong, a tool is not installed or the folder cannot be written: the message
            says which field, what was found, what is allowed and the fix. With STEPSCOPE_DISABLE=1 that is a
            warning, and what is returned are the defaults.
    """
    global _configured
    if switch.DISABLED:
        _configured = _unchecked(source, settings)
        return _configured
    config = resolve(source, None, **settings)
    check(config, on_ray=False)
    instrument(config)
    sigusr1.handle(config)
    _configured = config
    return config


def _unchecked(
    source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None, settings: dict[str, object]
) -> ProfileConfig:
    """Return the configuration as far as it can be resolved, for code that reads it while all is off."""
    try:
        return resolve(source, None, **settings)
    except ConfigError as error:
        failures.warn("stepscope: %s is set, so this is only a warning: %s", switch.VARIABLE, error)
        return ProfileConfig()


def current() -> ProfileConfig:
    """What `configure` set; else what STEPSCOPE_CONFIG and the environment say, resolved once."""
    global _configured
    if switch.DISABLED:
        return ProfileConfig() if _configured is None else _configured
    if _configured is None:
        _configured = resolve()
        instrument(_configured)
        if not _configured.steps:
            failures.warn(
                "stepscope: `steps` selects nothing, so this run records nothing before it is asked to "
                "(`stepscope trigger`). "
                'Set steps, for instance configure(steps=[2, "10:50:10"]) or STEPSCOPE_STEPS=2'
            )
    return _configured


def start_up() -> None:
    """Takes the environment's configuration while the program starts, before it imports a framework."""
    global _configured
    if _configured is None and not switch.DISABLED:
        _configured = resolve()
        instrument(_configured, lenient=True)


def instrument(config: ProfileConfig, *, lenient: bool = False) -> None:
    """Puts its `instrument` list into effect in this process; `recording.instrumented` says how."""
    if config.instrument or "stepscope.recording.instrument.configured" in sys.modules:
        from stepscope.recording.instrument import configured, no_step

        configured.apply(config, lenient=lenient)
        no_step.watch(config)


def check(config: ProfileConfig, *, on_ray: bool) -> None:
    """Everything about a configuration that can be wrong on this machine, once per configuration.

    Raises:
        ConfigError: see `configure`.
    """
    if (id(config), on_ray) in _checked:
        return
    check_tool(config)
    check_finish(config)
    check_save_path(config, on_ray=on_ray)
    _checked[id(config), on_ray] = config


def run_id() -> str:
    """Eight hex digits that all processes of one run share: STEPSCOPE_RUN_ID, or that of the Ray job, or
    agreed through torch.distributed's store, or this process' own (its fleet then carries it to the workers).
    """
    known = _ids.get("run")
    if known is None:
        given = os.environ.get("STEPSCOPE_RUN_ID") or _of_ray_job() or _agreed(os.urandom(4).hex())
        known = _ids.setdefault("run", given)
    return known


def _of_ray_job() -> str | None:
    # Worker groups that open captures by themselves have a torch store each, but one job.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    try:
        context = ray.get_runtime_context()
        job = f"{context.get_session_name()}/{context.get_job_id()}"
    except Exception as error:
        failures.note("reading the Ray job's id", error)
        return None
    from hashlib import sha256

    return sha256(job.encode()).hexdigest()[:8]


def _agreed(mine: str) -> str:
    # The store answers without a collective: a rank that never captures does not block the others.
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return mine
    try:
        store = distributed._get_default_store()
        return str(store.compare_set("stepscope/run_id", "", mine).decode())
    except Exception as error:
        failures.note("agreeing on a run id", error)
        return mine


def record(config: ProfileConfig) -> None:
    """Writes `run.json` when this run has none yet."""
    if config.save_path in _recorded:
        return
    _recorded.add(config.save_path)
    from socket import gethostname

    layout = RunLayout(config.save_path)
    data = RunRecord(
        run_id=run_id(),
        started_ns=time.time_ns(),
        host=gethostname(),
        pid=os.getpid(),
        command=tuple(sys.argv),
        config=config.to_mapping(),
        versions=versions(),
    )
    try:
        Path(config.save_path).mkdir(parents=True, exist_ok=True)
        write_atomic(layout.run(run_id()), msgspec.json.format(msgspec.json.encode(data)))
    except OSError as error:
        failures.note("writing run.json", error)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter to a trace's reader."""
    from importlib.metadata import PackageNotFoundError, version

    from stepscope.engines.protocol import distributions  # import time: once per run

    found = {"python": sys.version.split()[0]}
    for name in dict.fromkeys((*_NAMED, *distributions())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
