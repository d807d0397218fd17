"""Engines of unedited programs, armed when they are built: most profilers must be switched on there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope._recording.instrument.patch import parent_of, when_imported
from stepscope._recording.process import failures
from stepscope.config import ProfileConfig
from stepscope.errors import ours

if TYPE_CHECKING:
    from stepscope.engines.protocol import EngineFactory

_config: ProfileConfig | None = None
"""Configuration for engines that are built from now on; None to leave them alone. One writer: `watch`."""
_watched: set[str] = set()
"""Adapters whose library is patched at its import. One writer: `watch`."""


def watch(config: ProfileConfig, adapters: Set[str]) -> None:
    """Arm the engines of `adapters` that this process builds from now on, if `config` records engines."""
    global _config
    match = config.role("rollout")
    _config = config if adapters and match is not None and match[1].engine.profiler else None
    fresh = adapters - _watched if _config is not None else set()
    for adapter in sorted(fresh):
        _watched.add(adapter)
        when_imported(adapter, partial(_library_imported, adapter))


def _library_imported(adapter: str, library: ModuleType) -> None:
    from stepscope.engines.protocol import installed, load_engine  # import time: 15 ms

    try:
        factory = load_engine(adapter) if adapter in installed() else None
        if factory is not None and factory.builder:
            module, _, name = factory.builder.partition(":")
            when_imported(module, partial(_patch, factory, name))
    except ours() as error:  # the import is the user's, and succeeds
        failures.note(f"arming engines of {adapter!r}", error)


def _patch(factory: EngineFactory, name: str, module: ModuleType) -> None:
    try:
        parent, attribute = parent_of(module, name)
        setattr(parent, attribute, _armed(getattr(parent, attribute), factory))
    except ours() as error:  # as above
        failures.note(f"arming engines by {factory.builder}", error)


def _armed(build: Callable[..., Any], factory: EngineFactory) -> Callable[..., Any]:
    @functools.wraps(build)
    def armed(settings: Any, *args: Any, **kwargs: Any) -> Any:
        if _config is not None:
            try:
                factory.arm(_config, settings)
            except ours() as error:
                failures.note(f"arming an engine by {factory.builder}", error)
        return build(settings, *args, **kwargs)

    return armed
