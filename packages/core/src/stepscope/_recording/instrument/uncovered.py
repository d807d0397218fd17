"""Trainers that no preset covers, which are logged once and listed in the manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable

from stepscope._recording.process import failures
from stepscope.config.presets import Preset

_presets: dict[str, Preset] = {}
"""{`module:name` of a function whose first argument is the trainer: preset}. One writer: `expect`."""
_reasons: dict[type, str | None] = {}
"""{class of a trainer that was seen: reason why it is not covered, or None if it is covered}. One writer:
`look`."""


def expect(presets: Iterable[Preset]) -> None:
    """Set the presets that are applied."""
    _presets.clear()
    _reasons.clear()
    for preset in presets:
        _presets.update(dict.fromkeys(preset.covers, preset))


def look(target: str, args: tuple[object, ...]) -> None:
    """Log the class of the trainer, the first of `args`, if the preset of `target` does not cover this
    class.
    """
    preset = _presets.get(target)
    if preset is None or not args or type(args[0]) in _reasons:
        return
    cls = type(args[0])
    reason = _reasons[cls] = None if _is_covered(cls, preset, target) else _reason(cls, preset)
    if reason is not None and os.environ.get("RANK", "0") == "0":
        failures.warn_once(f"{cls.__name__}: {reason}")


def uncovered() -> dict[str, str]:
    """Return {class name: reason} of the trainers of this process that no preset covers."""
    return {cls.__name__: reason for cls, reason in _reasons.items() if reason is not None}


def _is_covered(cls: type, preset: Preset, target: str) -> bool:
    """Return whether the preset covers `cls`, or if `cls` is a user's class, its first base class from the
    framework.
    """
    # Packages of the framework, and of the framework that it extends.
    packages = (target.partition(".")[0], preset.distribution.replace("-", "_"))
    own = (base for base in cls.__mro__ if base.__module__.partition(".")[0] in packages)
    return next(own, cls).__name__ in preset.covers[target]


def _reason(cls: type, preset: Preset) -> str:
    return (
        f"the preset {preset.name!r} does not cover this trainer. Its steps show what all trainers of "
        f"the framework share, and no more. Fix: list functions of {cls.__module__}.{cls.__qualname__} "
        "under `instrument`"
    )
