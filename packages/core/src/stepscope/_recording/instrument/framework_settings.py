"""Settings of frameworks, which are read from the framework's configuration when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from stepscope._recording.instrument.call_arguments import Arguments
from stepscope.config.presets import ListedSettings, Preset, place_of
from stepscope.engines import settings
from stepscope.errors import ours
from stepscope.files.manifest import SWITCHES, FrameworkSettings, Setting, is_number

_ABSENT = object()


_sources: dict[str, tuple[FrameworkSettings, ListedSettings]] = {}
"""{`module:name` of a function that begins steps: (framework, settings to read)}. One writer: `expect`."""
_latest: int | None = None
"""Id of the configuration object that was read last, so that it is not read again in each step. Writers:
`expect`, `look`."""


def expect(presets: Iterable[Preset], installed: Callable[[str], str | None]) -> None:
    """Set the presets whose settings are read. `installed` returns the version of a distribution."""
    global _latest
    _latest = None
    _sources.clear()
    for preset in presets:
        if preset.settings is not None:
            framework = FrameworkSettings(framework=preset.name, version=installed(preset.distribution))
            begins = (entry for entry in preset.entries if entry.step not in (None, "end"))
            _sources.update(
                {f"{entry.module}:{entry.name}": (framework, preset.settings) for entry in begins}
            )


def look(target: str, arguments: Arguments, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Read the settings from the arguments of a call of `target`, a function that begins steps, and store
    them.
    """
    global _latest
    if target not in _sources:
        return
    framework, listed = _sources[target]
    try:
        configuration = arguments.read(listed.at, args, kwargs)
    except ours():  # another version may have it elsewhere
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
        # Not getattr for mappings, because a DictConfig returns None for a missing attribute.
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value
