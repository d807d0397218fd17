"""Integrations of stepscope into frameworks: callbacks, loggers and options. Other modules of stepscope do
not import them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from stepscope.config import ProfileConfig, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepscope.config import Settings


__all__ = ["add_arguments", "config_from_args"]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--stepscope-...` to `parser`, and return it.

    slime, miles and Megatron accept this function as an argument: `parse_args(add_arguments)`.
    """
    group = parser.add_argument_group("stepscope")
    group.add_argument("--stepscope-steps", metavar="STEPS", help="steps to capture: 2,10:50:10 or every:50")
    group.add_argument("--stepscope-save-path", metavar="FOLDER", help="the run's folder")
    group.add_argument(
        "--stepscope-preset", metavar="NAME", action="append", help="a framework whose functions are known"
    )
    group.add_argument("--stepscope-config", metavar="FILE", help="a configuration; the other options win")
    return parser


def config_from_args(args: argparse.Namespace) -> ProfileConfig:
    """Return the configuration from the parsed options of `add_arguments`, for `stepscope.configure`.

    The options override the environment, which overrides the configuration file.

    Raises:
        ConfigError: as `stepscope.configure`.
    """
    settings: Settings = {}
    if args.stepscope_steps is not None:
        settings["steps"] = args.stepscope_steps
    if args.stepscope_save_path is not None:
        settings["save_path"] = args.stepscope_save_path
    config = resolve(args.stepscope_config, None, **settings)
    listed = {entry.preset for entry in config.instrument}
    presets = [name for name in args.stepscope_preset or () if name not in listed]
    return config.replace(instrument=[*config.instrument, *presets]) if presets else config


class StepsCallback:
    """Base of callbacks for frameworks that call a method when a step begins and when it ends."""

    entries: ClassVar[tuple[Mapping[str, object], ...]]
    """Entries of `instrument`: methods that begin and end steps, and functions of the framework."""

    def __init__(
        self,
        source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """Configure this process, with the arguments of `stepscope.configure`. Without arguments, the current
        configuration is kept.

        Raises:
            ConfigError: as `stepscope.configure`.
        """
        from stepscope._recording.capture import configure  # imported here: options do not need it

        standing = source is None and not settings
        config = configure.current() if standing else resolve(source, None, **settings)
        listed = {(entry.module, entry.name) for entry in config.instrument}
        missing = [entry for entry in self.entries if (entry["module"], entry["name"]) not in listed]
        configure.configure(config.replace(instrument=[*config.instrument, *missing]))
