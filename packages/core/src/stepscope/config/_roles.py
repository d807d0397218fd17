"""Selection of processes: role patterns, their ranks, and the options of the engines behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from operator import index
from typing import ClassVar, Literal, SupportsIndex, TypeAlias

import msgspec

from stepscope.config._fields import (
    AtLeastOne,
    Count,
    Mistakes,
    Parser,
    Section,
    closest,
    dotted,
    items_of,
    take,
)
from stepscope.config._steps import check_range, parse_range
from stepscope.errors import ConfigError

Ranks: TypeAlias = Literal["all", "first"] | tuple[int, ...]

_RANKS = 'all, first, or ranks from 0: [0, 8], "0,8-15"'
_MOST = 1 << 16
"""Largest number of ranks in one range."""
_WILDCARD = re.compile(r"[*?]|\[!?\]?[^\]]*\]")  # as fnmatch reads them


def parse_ranks(value: object, field: str) -> Ranks:
    """Return `all`, `first`, or the ranks of a list, of one number, or of a text such as `0,8-15`.

    Raises:
        ConfigError: `value` is something else, or an empty list, which other tools read as rank 0, all ranks,
            or none.
    """
    if isinstance(value, str) and value in ("all", "first"):
        return "all" if value == "all" else "first"
    items = items_of(value)
    ranks, mistakes = tuple[int, ...](), Mistakes()
    for item in [value] if items is None else items:
        with mistakes.noted():
            ranks += tuple(_ranks(item, field))
    mistakes.raise_any()
    if not ranks:
        fix = "an empty list selects nothing; write ranks: all or first, or profiler: off for spans alone"
        raise ConfigError(field, value, _RANKS, fix)
    for at, rank in enumerate(ranks):
        if rank in ranks[:at]:
            raise ConfigError(field, value, "each rank once", f"take the second {rank} out")
    return ranks


def parse_profiler(value: object, field: str) -> bool:
    """Return True for `on` and False for `off`, which YAML reads as true and false."""
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word in ("on", "off", "true", "false", "1", "0"):
        return word in ("on", "true", "1")
    raise ConfigError(field, value, "on or off", "write profiler: off for spans alone, or leave it out")


def parse_engine_profiler(value: object, field: str) -> bool | Literal["passes"]:
    """Return what `parse_profiler` returns, or `passes`."""
    if value == "passes":
        return "passes"
    try:
        return parse_profiler(value, field)
    except ConfigError:
        fix = "write profiler: passes for the engine's forward passes without its own profiler"
        raise ConfigError(field, value, "on, off or passes", fix) from None


def parse_roles(value: object, field: str) -> dict[str, RoleConfig]:
    """Return {pattern: its settings} in written order, in which the first match wins.

    Raises:
        ConfigError: not a mapping, empty, or a pattern stands behind one that matches all its names.
    """
    if not isinstance(value, Mapping) or not value:
        why = "an empty mapping selects nothing; " if value == {} else ""
        fix = f'{why}write {{"*": {{ranks: first}}}}'
        raise ConfigError(field, value, "a mapping of role patterns to their settings", fix)
    roles: dict[str, RoleConfig] = {}
    mistakes = Mistakes()
    for pattern, given in value.items():
        with mistakes.noted():
            if not isinstance(pattern, str) or not pattern.strip():
                raise ConfigError(field, pattern, "role names and globs, as text", "put the name in quotes")
            if given is not None and not isinstance(given, Mapping | RoleConfig):
                raise _short_form(pattern, given, dotted(field, pattern))
            roles[pattern] = take(RoleConfig, given, dotted(field, pattern))  # type: ignore[assignment]  # by kind
    mistakes.raise_any()
    _check_reachable(list(roles), field)
    return roles


def _short_form(pattern: str, given: object, field: str) -> ConfigError:
    """Return the error for a role whose value is one of its settings, as in `actor: all`."""
    key = "profiler" if isinstance(given, bool) or given in ("on", "off") else "ranks"
    value = ("off", "on")[given] if isinstance(given, bool) else given
    try:
        (parse_profiler if key == "profiler" else parse_ranks)(value, field)
    except ConfigError:
        key, value = "ranks", "all"
    name = pattern if pattern.isidentifier() else f'"{pattern}"'
    allowed = "a mapping with the keys " + ", ".join(RoleConfig.__struct_fields__)
    return ConfigError(field, given, allowed, f"write {name}: {{{key}: {value}}}")


def hides(earlier: str, later: str) -> bool:
    """Return whether `earlier` matches every name that `later` matches, so that `later` is never used.

    True is certain; False is not, because an `earlier` with `?` or `[...]` is only compared with plain names.
    """
    if not _WILDCARD.search(later):
        return fnmatchcase(later, earlier)
    # Only a star of `earlier` can match the stand-in, and a star matches whatever stands there instead.
    return not re.search(r"[?[]", earlier) and fnmatchcase(_WILDCARD.sub("\0", later), earlier)


def _ranks(item: object, field: str) -> Sequence[int]:
    """Return the ranks of one item of a list: a number, or a range."""
    return _range(item.strip(), field) if isinstance(item, str) else (_rank(item, field),)


def _range(text: str, field: str) -> range:
    parts = parse_range(text)
    if parts is None:
        near = closest(text, ("all", "first"))
        fix = f"did you mean {near!r}?" if near else "write all, first or [0, 8]"
        raise ConfigError(field, text, _RANKS, fix)
    start, stop, stride = parts
    check_range(start, stop, stride, text, field)
    if stop is None or stop - start > _MOST:
        # A rank that is listed is expected: one that the run lacks is missing in the manifest.
        allowed = f"ranges of ranks with an end, and at most {_MOST} ranks"
        raise ConfigError(field, text, allowed, f"write the last rank too, such as {start}-{start + 7}")
    return range(start, stop, stride)


def _rank(item: object, field: str) -> int:
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        raise ConfigError(field, item, _RANKS, "write all, first or [0, 8]")
    if index(item) < 0:
        raise ConfigError(field, item, _RANKS, "write the rank itself; ranks do not count from the end")
    return index(item)


def _check_reachable(patterns: list[str], field: str) -> None:
    for at, later in enumerate(patterns):
        for earlier in patterns[:at]:
            if hides(earlier, later):
                raise ConfigError(
                    field,
                    patterns,
                    "patterns in an order in which each can match (the first match wins)",
                    f"{earlier!r} matches all that {later!r} does; write {later!r} before {earlier!r}",
                )


class IterationsConfig(Section, frozen=True, kw_only=True):
    """A window of engine iterations (its forward passes, not tokens), counted from the start of a capture."""

    _at: ClassVar[str] = "roles.<role>.engine.iterations"

    start: Count = 0
    """Iterations left out first."""
    count: AtLeastOne | None = None
    """Iterations recorded; None records until the capture ends."""
    running: AtLeastOne | None = None
    """The window opens when so many requests run in the replica, on each data-parallel rank between two
    passes of its own, so not at the same pass of all; None opens it with the capture."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Options of the inference engine's own profiler, for a role served by engines."""

    _at: ClassVar[str] = "roles.<role>.engine"
    _parsers: ClassVar[Mapping[str, Parser]] = {"profiler": parse_engine_profiler}

    profiler: bool | Literal["passes"] = True
    """`off`: no engine is recorded, neither those given to `capture` nor those of `instrument` entries.
    `passes`: the engine's own profiler does not run, and its forward passes are noted."""
    iterations: IterationsConfig = msgspec.field(default_factory=IterationsConfig)
    """Engine iterations that are recorded."""
    by_stage: bool = False
    """Prefill and decode in traces of their own."""
    merge: bool = False
    """The engine joins the traces of its own ranks."""
    passes: Count = 100_000
    """Most forward passes of an engine whose requests are noted beside its traces; 0 for none."""
    extra: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    """Passed through to the engine after a check that its own signature knows every key."""


class RoleConfig(Section, frozen=True, kw_only=True):
    """Processes with a profiler, among roles that a pattern matches. Spans are recorded in all."""

    _at: ClassVar[str] = "roles.<role>"
    _parsers: ClassVar[Mapping[str, Parser]] = {"ranks": parse_ranks, "profiler": parse_profiler}

    ranks: Ranks = "first"
    """`all`, `first` (rank 0), or global ranks."""
    profiler: bool = True
    """`off`: spans alone in the role's processes. Engines are recorded all the same: `engine.profiler`."""
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    """Settings of a role whose work is done by inference engines."""
