"""Configuration of this process: `configure`, checks, and the instrumentation that a configuration lists."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from stepscope._recording.instrument import configured, no_step
from stepscope._recording.process import failures, shutdown
from stepscope._recording.recorder import visits
from stepscope._recording.spans import slot
from stepscope.config import ProfileConfig, check_finish, check_save_path, check_tool, resolve
from stepscope.errors import ConfigError
from stepscope.files import switch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepscope.config import Settings

_configured: ProfileConfig | None = None
"""Configuration from `configure` or the environment, or None before the first use. One writer: this
module."""
_checked: dict[tuple[int, bool], ProfileConfig] = {}
"""{(id of a checked configuration, True if the workers are Ray actors): the configuration}. The dict keeps
the configurations alive, so that their ids are not reused."""
_MOST_PLACED = 64
_placed: dict[int, tuple[ProfileConfig, ProfileConfig]] = {}
"""{id of a configuration: (the configuration with a relative `save_path`, its copy with an absolute path)}.
Both ids are keys. One writer: `placed`."""


def configure(
    source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> ProfileConfig:
    """Set this process' configuration for every later `capture` without a `config`.

        configure(steps=[2, "10:50:10"], save_path="/data/profile")

    Args:
        source: Path of a YAML or JSON file, or a mapping with the same content, or a `ProfileConfig`, which
            is used unchanged. By default the file that STEPSCOPE_CONFIG names, if any.
        **settings: Fields of `ProfileConfig`. They override STEPSCOPE_* environment variables, which override
            the file.

    Returns:
        The resolved configuration.

    Raises:
        ConfigError: A value is wrong, the tool is not installed, or the folder is not writable. The message
            states the field, its value, the allowed values and the fix. With STEPSCOPE_DISABLE=1 this is only
            a warning, and the defaults are returned.
    """
    global _configured
    if switch.DISABLED:
        _configured = _unchecked(source, settings)
        return _configured
    config = resolve(source, None, **settings)
    check(config, on_ray=False)
    config = placed(config)
    instrument(config)
    shutdown.handle(config)
    _configured = config
    slot.visit = _visit
    return config


def _visit(caller: str, run_id: str, step: int) -> slot.Visit | None:
    return visits.visit(current(), caller, run_id, step)


def placed(config: ProfileConfig) -> ProfileConfig:
    """Return the configuration with an absolute `save_path`. The same `config` gives the same object.

    A program that later changes its working directory then still writes into one folder.
    """
    if os.path.isabs(config.save_path):
        return config
    if id(config) not in _placed:
        while len(_placed) >= _MOST_PLACED:  # bounded, as a loop may create a configuration in each step
            del _placed[next(iter(_placed))]
        path = type(config.save_path)(os.path.abspath(config.save_path))  # UnnamedPath stays UnnamedPath
        absolute = msgspec.structs.replace(config, save_path=path)
        _placed[id(config)] = _placed[id(absolute)] = config, absolute
    return _placed[id(config)][1]


def _unchecked(
    source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None, settings: Settings
) -> ProfileConfig:
    """Resolve a configuration while stepscope is off. A wrong value is logged, and the defaults are
    returned.
    """
    try:
        return resolve(source, None, **settings)
    except ConfigError as error:
        failures.warn("stepscope: %s is set, so this is only a warning: %s", switch.VARIABLE, error)
        return ProfileConfig()


def current() -> ProfileConfig:
    """Return the configuration from `configure`. Without one, resolve and keep the configuration from the
    environment.
    """
    global _configured
    if switch.DISABLED:
        return ProfileConfig() if _configured is None else _configured
    if _configured is None:
        _configured = placed(resolve())
        instrument(_configured)
        if not _configured.steps:
            failures.warn(
                "stepscope: `steps` selects nothing, so this run captures nothing before it is asked to "
                "(`stepscope trigger`). "
                'Set steps, for instance configure(steps=[2, "10:50:10"]) or STEPSCOPE_STEPS=2'
            )
    return _configured


def start_up(config: ProfileConfig | None = None) -> None:
    """Set the configuration at the start of the program, before it imports modules to instrument.

    Args:
        config: Configuration from another process of the run; by default from the environment. It has no
            effect if this process is already configured.
    """
    global _configured
    if _configured is None and not switch.DISABLED:
        _configured = placed(resolve() if config is None else config)
        instrument(_configured, lenient=True)


def instrument(config: ProfileConfig, *, lenient: bool = False) -> None:
    """Instrument the functions in the `instrument` list of a configuration, as `instrument.configured`
    describes.
    """
    if config.instrument or "stepscope._recording.instrument.configured" in sys.modules:
        configured.apply(config, lenient=lenient)
        no_step.watch(config)


def check(config: ProfileConfig, *, on_ray: bool) -> None:
    """Check once whether a configuration works on this machine.

    Raises:
        ConfigError: as in `configure`.
    """
    if (id(config), on_ray) in _checked:
        return
    check_tool(config)
    check_finish(config)
    as_written, _ = _placed.get(id(config), (config, config))
    check_save_path(as_written, on_ray=on_ray)
    _checked[id(config), on_ray] = config
