"""Captures of a loop that calls a callback when a step begins and when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from stepscope.config import ProfileConfig, resolve
from stepscope.recording.capture import configure

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepscope.config import Settings


def capture_steps(
    entries: Iterable[Mapping[str, object]],
    source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None,
    **settings: Unpack[Settings],
) -> ProfileConfig:
    """Configure this process as `configure` does, and add entries of `instrument` that bound the steps.

    Args:
        entries: Methods of a callback, with `step`, and functions of its framework.
        source: As for `configure`. None without settings: the configuration that stands.

    Raises:
        ConfigError: as `configure`.
    """
    standing = source is None and not settings
    config = configure.current() if standing else resolve(source, None, **settings)
    listed = {(entry.module, entry.name) for entry in config.instrument}
    missing = [entry for entry in entries if (entry["module"], entry["name"]) not in listed]
    return configure.configure(config.replace(instrument=[*config.instrument, *missing]))
