"""Captures of a loop that calls a callback when a step begins and when it ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from stepscope._recording.capture import configure
from stepscope.config import ProfileConfig, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepscope.config import Settings


class StepsCallback:
    """Base of the callbacks. It captures the steps that its methods begin and end."""

    entries: ClassVar[tuple[Mapping[str, object], ...]]
    """Entries of `instrument`: methods of the callback, with `step`, and functions of its framework."""

    def __init__(
        self,
        source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """Configure this process. The arguments are those of `stepscope.configure`; without any, the present
        configuration is kept.

        Raises:
            ConfigError: as `stepscope.configure`.
        """
        standing = source is None and not settings
        config = configure.current() if standing else resolve(source, None, **settings)
        listed = {(entry.module, entry.name) for entry in config.instrument}
        missing = [entry for entry in self.entries if (entry["module"], entry["name"]) not in listed]
        configure.configure(config.replace(instrument=[*config.instrument, *missing]))
