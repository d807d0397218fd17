"""Settings of the framework at hand: those that a step recorded, and changes that advice suggests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.files.manifest.records import FrameworkSettings, Manifest, Setting

Direction: TypeAlias = Literal["higher", "lower", "on"]


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    framework: str
    version: str | None = None
    """The framework's version, as recorded."""
    setting: str
    present: bool | int | float | str | None = None
    """The present value, or None if it is unset or differs between processes."""
    suggested: bool | int | float | str | None = None
    """The suggested value; None if no measurement gives one."""
    direction: Direction
    """The direction of the change; `on` turns a switch on."""
    predicted_saving_ns: int | None = None
    """Saving per step that what-if predicts, or None if what-if cannot make this change, refuses it, or
    predicts no saving."""
    error_ns: int | None = None
    """Half of the interval of 95 % around the prediction: the distance to its farther end."""


class Located(NamedTuple):
    framework: FrameworkSettings
    setting: Setting


Settings: TypeAlias = Mapping[str, Located]
"""{knob: its setting, with the framework or engine that has it}."""


def step_settings(manifest: Manifest | None) -> Settings:
    """Return the settings that the processes of a step recorded. For a knob that a framework and its engine
    both have, return the framework's.
    """
    parts = () if manifest is None else sorted(manifest.processes, key=lambda part: not part.owner)
    recorded = [framework for part in parts for framework in part.settings]
    located: dict[str, Located] = {}
    for framework in sorted(recorded, key=lambda framework: framework.engine):
        for setting in framework.settings:
            known = located.setdefault(setting.knob, Located(framework, setting))
            if known.framework.framework == framework.framework and known.setting != setting:
                differs = msgspec.structs.replace(setting, value=None, better=None)
                located[setting.knob] = Located(framework, differs)
    return located
