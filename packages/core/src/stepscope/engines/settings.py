"""Settings of this process' framework and engines, for the advice of reports."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stepscope.config._fields import closest
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope.files.manifest import (
    KNOBS,
    SWITCHES,
    FrameworkSettings,
    Knob,
    Named,
    Setting,
    is_number,
)

_MOST = 8
"""Largest number of frameworks and engines of one process."""
_LONGEST = 200
_WORD = re.compile(r"[A-Za-z][\w.-]{0,39}")

_named: dict[str, FrameworkSettings] = {}
"""{framework: its settings}. Only `keep` changes it."""


def name_settings(
    framework: str,
    settings: Mapping[Knob, Named],
    *,
    version: str | None = None,
    engine: bool = False,
) -> None:
    """Name settings of this run that advice in a report may suggest to change.

    Presets and engine adapters call this for their own settings. A later call for the same framework replaces
    its settings.

        name_settings("mine", {"max_requests": ("rollout.slots", 256), "tool_pool": ("tools", 8)})

    Args:
        framework: Name of the framework or engine.
        settings: {knob: (name, current value)}. A value is a number, a boolean, or None if unset. For a
            switch that is not turned on by True: (name, current value, value that turns it on); both values
            may be words.
        version: Version of the framework.
        engine: True for an inference engine. Advice prefers a setting of the framework to one of its engine.

    Raises:
        ConfigError: a knob is unknown, or a name or value is not valid.
    """
    if switch.DISABLED:
        return
    keep(
        FrameworkSettings(
            framework=_name("framework", framework),
            version=None if version is None else str(version)[:_LONGEST],
            engine=engine,
            settings=tuple(_setting(knob, named) for knob, named in settings.items()),
        )
    )


def keep(settings: FrameworkSettings) -> None:
    """Keep settings for the manifest, in place of earlier settings of the same framework."""
    if settings.framework in _named or len(_named) < _MOST:
        _named[settings.framework] = settings


def kept() -> tuple[FrameworkSettings, ...]:
    """Return the settings that were kept in this process, frameworks before engines."""
    return tuple(sorted(_named.values(), key=lambda settings: settings.engine))


def _setting(knob: str, named: Named) -> Setting:
    field = f"settings[{knob!r}]"
    if knob not in KNOBS:
        near = closest(knob, KNOBS)
        fix = f"did you mean {near!r}?" if near else "omit what no knob stands for"
        raise ConfigError(field, named, f"knobs: {', '.join(KNOBS)}", fix)
    if len(named) not in (2, 3):
        raise ConfigError(field, named, "(name, value)", "for instance ('rollout.slots', 256)")
    name, value = _name(field, named[0]), named[1]
    better: bool | str = named[2] if len(named) == 3 else True
    is_word = knob in SWITCHES and isinstance(better, str) and _is_word(better) and _is_word(value)
    if not (is_word or is_number(value)):
        allowed = "a number, a boolean or None; for a switch with words, a word"
        raise ConfigError(field, value, allowed, "give the number, or omit the setting")
    is_off = knob in SWITCHES and value != better
    return Setting(knob=knob, name=name, value=value, better=better if is_off else None)


def _name(field: str, name: object) -> str:
    if not (isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isprintable()):
        raise ConfigError(field, name, f"a printable name of up to {_LONGEST} characters", "shorten it")
    return name


def _is_word(value: object) -> bool:
    return value is None or (isinstance(value, str) and _WORD.fullmatch(value) is not None)
