"""Presets: the functions of known frameworks. Each preset is a YAML file in `frameworks/`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from stepscope.config._fields import build
from stepscope.config._instrument import FRAMEWORKS, InstrumentConfig
from stepscope.config._instrument import preset_names as preset_names


class ListedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of the framework that the report may advise to change."""

    name: str
    """The setting's name as users write it: `trainer.balance_batch`, `--use-dynamic-batch-size`."""
    better: bool | str = True
    """The value that turns a switch on."""
    instead_of: tuple[str, ...] = ()
    """Values that turn the switch off, if the switch takes words; else empty."""
    where: str | None = None
    """A setting that must be on for this setting to have an effect, or None."""


def place_of(name: str) -> tuple[str, ...]:
    """Return the keys that lead to a setting in the configuration of its framework, the outermost first."""
    plain = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name
    return tuple(plain.split("."))


class ListedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that are read from a framework's configuration when a step begins."""

    at: str
    """Path to the configuration, from an argument of the function that begins a step."""
    names: dict[str, ListedSetting | str]
    """{knob, as the report's advice names it: setting}. A text stands for a `ListedSetting` with that
    name."""

    def items(self) -> Iterator[tuple[str, ListedSetting]]:
        """Yield each knob with its setting."""
        for knob, listed in self.names.items():
            yield knob, ListedSetting(name=listed) if isinstance(listed, str) else listed


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one framework."""

    name: str
    distribution: str
    """The package whose installed version is compared with the `since` of each entry."""
    tested: str
    """The versions, or the commit, in which the functions were checked."""
    entries: tuple[InstrumentConfig, ...]
    integration: str | None
    """Module of stepscope that is imported after the framework, or None."""
    covers: dict[str, tuple[str, ...]]
    """{function: trainer classes that the entries cover}. The function is `module:name`; its first argument
    is the trainer."""
    settings: ListedSettings | None = None


def read_preset(name: str, installed: Callable[[str], str | None] = lambda _: None) -> Preset:
    """Read the preset `name`, one of `preset_names()`.

    Args:
        installed: Returns the installed version of a distribution, or None. Entries that need a newer version
            are left out; with None, all entries are kept.
    """
    from stepscope.config._yaml import load  # imported here, because yaml takes 20 ms

    data = cast("dict[str, Any]", load(FRAMEWORKS / f"{name}.yaml", f"the preset {name!r}"))
    version = installed(data["distribution"])
    entries = []
    for given in data["instrument"]:
        since = given.get("since")
        if since is None or version is None or _numbers(version) >= _numbers(str(since)):
            plain = {key: value for key, value in given.items() if key != "since"}
            entries.append(build(InstrumentConfig, plain, "instrument"))
    return Preset(
        name=name,
        distribution=data["distribution"],
        tested=str(data["tested"]),
        entries=tuple(entries),
        integration=data.get("integration"),
        covers={target: tuple(classes) for target, classes in data.get("covers", {}).items()},
        settings=msgspec.convert(data.get("settings"), ListedSettings | None),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at the end: `0.8.0rc1` -> (0, 8)."""
    release = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [] if release is None else [int(part) for part in release[1].split(".")]
    while numbers and not numbers[-1]:  # so that 0.9 equals 0.9.0
        numbers.pop()
    return tuple(numbers)
