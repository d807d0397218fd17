"""Keys that the plugin adds to a scheduler's internal state, and functions that read the keys' values.

SGLang asks its schedulers for their internal state. `plugin` adds the keys to the answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Literal, TypeAlias

import msgspec

Doing: TypeAlias = Literal["starting", "writing"]


RPD_LIBRARY = "rpdTracerControl"
"""Name of the module that the activity RPD needs."""

COUNT = "forward_ct"
"""Key of the number of forward passes since the scheduler started. Some versions of SGLang set this key."""

SCOPES_END = "stepscope_scopes_end"
"""Key that is true if stepscope ends open scopes at the end of a profile (`record_function_scopes`)."""

SENDS_QUIET = "stepscope_sends_quiet"
"""Key that is true if sends between pipeline ranks are left out of recordings."""

VERSION = "stepscope_version"
"""Key of the version of this package that is installed in the scheduler's environment."""

PROFILE_V2 = "stepscope_profile_v2"
"""Key that is true if the scheduler uses SGLang's second profiler, whose stop kills the scheduler."""

RPD = "stepscope_rpd"
"""Key that is true if the library of the activity RPD is installed."""

RECORDINGS = "stepscope_recordings"
"""Key of the latest `Stamp`s: a stamp for each time that the profiler started or wrote."""

ALONE = "stepscope_passes_alone"
"""Key that is true if a capture can note passes without SGLang's profiler."""

STAGES = "stepscope_stages"
"""Key of the numbers of prefill and decode passes since the latest capture by stage began."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """One start or one write of a scheduler's profiler. The scheduler served nothing during this time."""

    folder: str
    """Folder of the recording, which is different for each capture."""
    pid: int
    doing: Doing
    start_ns: int
    end_ns: int
    passes: int
    """Number of forward passes that the scheduler had begun before the start or write."""


def own_version() -> str:
    return metadata.version("stepscope-rollout-sglang")


def profile_v2() -> bool:
    """Return whether SGLANG_PROFILE_V2 is set in this process."""
    return os.environ.get("SGLANG_PROFILE_V2", "").lower() in ("1", "true", "yes", "y")


def counts_in(states: Sequence[object]) -> tuple[int, ...]:
    """Return the number of forward passes of each data-parallel scheduler; empty if a scheduler does not show
    its number.
    """
    counts = _shown(states, COUNT)
    return tuple(count for count in counts if isinstance(count, int)) if None not in counts else ()


def stamps_in(states: Sequence[object], folder: str) -> list[Stamp]:
    """Return the stamps of one capture, from all schedulers that show stamps."""
    stamps = []
    for shown in _shown(states, RECORDINGS):
        for stamp in shown if isinstance(shown, list) else ():
            with suppress(msgspec.ValidationError):  # from another version of stepscope
                stamps.append(msgspec.convert(stamp, Stamp))
    return [stamp for stamp in stamps if stamp.folder == folder]


def stages_in(states: Sequence[object]) -> list[Mapping[str, int] | None]:
    """Return {stage: number of passes} for each data-parallel scheduler; None for a scheduler that does not
    show these numbers.
    """
    return [shown if isinstance(shown, dict) else None for shown in _shown(states, STAGES)]


def all_show(states: Sequence[object], name: str) -> bool:
    """Return whether `SCOPES_END`, `SENDS_QUIET` or `ALONE` (as `name`) is true in every data-parallel
    scheduler.
    """
    values = _shown(states, name)
    return bool(values) and all(values)


def v2_in(states: Sequence[object]) -> bool:
    """Return whether a scheduler is known to use SGLang's second profiler."""
    return True in _shown(states, PROFILE_V2)


def rpd_in(states: Sequence[object]) -> bool | None:
    """Return whether every scheduler has the library of RPD, or None if a scheduler does not show it."""
    libraries = _shown(states, RPD)
    return all(libraries) if libraries and None not in libraries else None


def why_not_shown(states: Sequence[object]) -> str:
    """Return two sentences about schedulers that do not show the plugin's state: the cause and the fix."""
    plugins = zip(_shown(states, COUNT), _shown(states, VERSION), strict=True)
    older = [version or "without a version" for count, version in plugins if count is not None]
    if not older:
        return (
            "Our plugin is needed, and these schedulers have not loaded it. Fix: install "
            "stepscope-rollout-sglang where the engine runs (with `stepscope` in SGLANG_PLUGINS, if that is "
            "set)"
        )
    return (
        f"These schedulers have loaded stepscope-rollout-sglang {older[0]}, which is too old for it; this "
        f"process has {own_version()}. Fix: install the same version where the engine runs"
    )


def _shown(states: Sequence[object], name: str) -> list[object]:
    return [state.get(name) if isinstance(state, dict) else None for state in states]
