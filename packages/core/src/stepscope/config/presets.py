"""What is known of frameworks: a YAML file each in `frameworks/`, with entries as one would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stepscope.config._section import build

if TYPE_CHECKING:
    from stepscope.config._instrument import InstrumentConfig

_FOLDER = Path(__file__).parent / "frameworks"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one framework."""

    name: str
    distribution: str
    """What is installed, and has a version."""
    tested: str
    """The versions, or the commit, whose names were looked up."""
    entries: tuple[InstrumentConfig, ...]


def preset_names() -> tuple[str, ...]:
    """The presets that there are."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def read_preset(name: str, installed: Callable[[str], str | None] = lambda _: None) -> Preset:
    """The preset `name`, one of `preset_names()`.

    Args:
        installed: Says which version of a distribution is installed: entries that are newer are left out.
            None leaves out none.
    """
    from stepscope.config._instrument import InstrumentConfig
    from stepscope.config._yaml import load

    data = cast("dict[str, Any]", load(_FOLDER / f"{name}.yaml", f"the preset {name!r}"))
    found = installed(data["distribution"])
    entries = []
    for given in data["instrument"]:
        since = given.get("since")
        if since is None or found is None or _numbers(found) >= _numbers(str(since)):
            plain = {key: value for key, value in given.items() if key != "since"}
            entries.append(build(InstrumentConfig, plain, "instrument"))
    return Preset(
        name=name,
        distribution=data["distribution"],
        tested=str(data["tested"]),
        entries=tuple(entries),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: all that a preset's `since` compares."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
