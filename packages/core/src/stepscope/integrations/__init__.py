"""Integrations of stepscope into frameworks: callbacks, loggers and options. Other modules of stepscope do
not import them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stepscope.config import ProfileConfig, resolve

if TYPE_CHECKING:
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

    The options override the environment, which overrides the file.

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
