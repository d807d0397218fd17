"""Base of callbacks for frameworks that call a method when a step begins and when it ends."""

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
    """Base of the callbacks. `entries` name the methods that begin and end steps."""

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
        standing = source is None and not settings
        config = configure.current() if standing else resolve(source, None, **settings)
        listed = {(entry.module, entry.name) for entry in config.instrument}
        missing = [entry for entry in self.entries if (entry["module"], entry["name"]) not in listed]
        configure.configure(config.replace(instrument=[*config.instrument, *missing]))
