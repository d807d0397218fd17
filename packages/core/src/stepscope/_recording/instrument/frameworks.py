"""Trainers of frameworks: settings that are read when a step begins, and trainers that no preset covers.

A trainer that no preset covers is logged once and listed in the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from stepscope._recording.instrument.call_arguments import Arguments
from stepscope._recording.process import failures
from stepscope.config.presets import ListedSettings, Preset, place_of
from stepscope.engines import settings
from stepscope.errors import ours
from stepscope.files.manifest import SWITCHES, FrameworkSettings, Setting, is_number

_ABSENT = object()
_settings_of: dict[str, tuple[FrameworkSettings, ListedSettings]] = {}
"""{`module:name` of a function that begins steps: (framework, settings to read)}. One writer: `expect`."""
_latest: int | None = None
"""Id of the configuration object that was read last, so that it is not read again in each step. Writers:
`expect`, `read_settings`."""
_covering: dict[str, Preset] = {}
"""{`module:name` of a function whose first argument is the trainer: preset}. One writer: `expect`."""
_reasons: dict[type, str | None] = {}
"""{class of a trainer that was seen: reason why it is not covered, or None if it is covered}. One writer:
`check_covered`."""


def expect(presets: Iterable[Preset], installed: Callable[[str], str | None] = lambda _: None) -> None:
    """Set the presets that are applied.

    Args:
        installed: Function that returns the version of a distribution, or None if it is not installed.
    """
    global _latest
    _latest = None
    for known in (_settings_of, _covering, _reasons):
        known.clear()
    for preset in presets:
        _covering.update(dict.fromkeys(preset.covers, preset))
        if preset.settings is not None:
            framework = FrameworkSettings(framework=preset.name, version=installed(preset.distribution))
            begins = (entry for entry in preset.entries if entry.step not in (None, "end"))
            _settings_of.update(
                {f"{entry.module}:{entry.name}": (framework, preset.settings) for entry in begins}
            )


def read_settings(
    target: str, arguments: Arguments, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Read and store the settings in the arguments of a call of `target`, a function that begins steps."""
    global _latest
    if target not in _settings_of:
        return
    framework, listed = _settings_of[target]
    try:
        configuration = arguments.read(listed.at, args, kwargs)
    except ours():  # another version of the framework may keep the settings elsewhere
        return
    if id(configuration) != _latest:
        _latest = id(configuration)
        values = tuple(_read(configuration, listed))
        settings.keep(msgspec.structs.replace(framework, settings=values))


def _read(configuration: object, listed: ListedSettings) -> Iterator[Setting]:
    """Yield the listed settings that the configuration has, if their values are numbers or listed words."""
    for knob, setting in listed.items():
        value: object = _ABSENT
        try:
            if setting.where is None or _value_at(configuration, setting.where):
                value = _value_at(configuration, setting.name)
        except ours():  # no such setting, or it cannot be resolved
            pass
        if not (is_number(value) or value in (setting.better, *setting.instead_of)):
            continue
        is_off = value in setting.instead_of or value is (not setting.better)
        better = setting.better if is_off and knob in SWITCHES else None
        yield Setting(knob=knob, name=setting.name, value=value, better=better)


def _value_at(configuration: object, setting: str) -> object:
    value = configuration
    for name in place_of(setting):
        # Mappings are read by key, because a DictConfig returns None for a missing attribute.
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def check_covered(target: str, args: tuple[object, ...]) -> None:
    """Log the class of the trainer, the first of `args`, if the preset of `target` does not cover this
    class.
    """
    preset = _covering.get(target)
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
