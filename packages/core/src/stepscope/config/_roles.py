"""`roles`: which processes are profiled, by role and rank, and the options of inference engines."""

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
_WILDCARD = re.compile(r"[*?]|\[!?\]?[^\]]*\]")  # a wildcard of fnmatch


def parse_ranks(value: object, field: str) -> Ranks:
    """Return `all`, `first`, or the ranks in a list, a number, or a text such as `0,8-15`.

    Raises:
        ConfigError: `value` has another form, contains a rank twice, or is an empty list (which other tools
            read as rank 0, as all ranks, or as no rank).
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
    """Return True for `on` and False for `off`. YAML reads these words as true and false."""
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word in ("on", "off", "true", "false", "1", "0"):
        return word in ("on", "true", "1")
    raise ConfigError(field, value, "on or off", "write profiler: off for spans alone, or leave it out")


def parse_engine_profiler(value: object, field: str) -> bool | Literal["passes"]:
    """Return `passes`, or True or False as `parse_profiler` does."""
    if value == "passes":
        return "passes"
    try:
        return parse_profiler(value, field)
    except ConfigError:
        fix = "write profiler: passes for the engine's forward passes without its own profiler"
        raise ConfigError(field, value, "on, off or passes", fix) from None


def parse_roles(value: object, field: str) -> dict[str, RoleConfig]:
    """Return {pattern: its settings} in the given order, because the first match wins.

    Raises:
        ConfigError: `value` is not a mapping, is empty, or has a pattern that can never match because an
            earlier pattern matches all its names.
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
            roles[pattern] = take(RoleConfig, given, dotted(field, pattern))  # type: ignore[assignment]  # of type `kind`
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

    False may be wrong: if both patterns have wildcards, an `earlier` with `?` or `[...]` is not analysed.
    """
    if not _WILDCARD.search(later):
        return fnmatchcase(later, earlier)
    # "\0" stands for each wildcard of `later`. Only a star of `earlier` matches "\0", and a star also matches
    # everything that the wildcard matches.
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
        # Every listed rank is expected, and the manifest reports it as missing if the run lacks it. So a
        # range must have an end.
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
    """A window of engine iterations (forward passes, not tokens), counted from the start of a capture."""

    _at: ClassVar[str] = "roles.<role>.engine.iterations"

    start: Count = 0
    """Iterations to skip before recording."""
    count: AtLeastOne | None = None
    """Iterations to record; None records until the capture ends."""
    running: AtLeastOne | None = None
    """The window opens once this many requests run in the replica; None opens it with the capture. Each
    data-parallel rank opens it between two of its own passes, so the ranks do not begin at the same pass."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Options of the inference engine's own profiler, for a role served by engines."""

    _at: ClassVar[str] = "roles.<role>.engine"
    _parsers: ClassVar[Mapping[str, Parser]] = {"profiler": parse_engine_profiler}

    profiler: bool | Literal["passes"] = True
    """`on`: the engine's own profiler runs. `passes`: only the engine's forward passes are recorded. `off`:
    engines are not recorded, whether `capture` or an `instrument` entry names them."""
    iterations: IterationsConfig = msgspec.field(default_factory=IterationsConfig)
    """The iterations to record."""
    by_stage: bool = False
    """Write prefill and decode to separate traces."""
    merge: bool = False
    """Let the engine merge the traces of its ranks."""
    passes: Count = 100_000
    """Largest number of an engine's forward passes that are recorded with their requests; 0 for none."""
    extra: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    """Further arguments for the engine's profiler. A key that the engine does not accept is an error."""


class RoleConfig(Section, frozen=True, kw_only=True):
    """Settings of the roles that a pattern matches: which processes run a profiler. Spans are recorded in all
    processes.
    """

    _at: ClassVar[str] = "roles.<role>"
    _parsers: ClassVar[Mapping[str, Parser]] = {"ranks": parse_ranks, "profiler": parse_profiler}

    ranks: Ranks = "first"
    """Ranks that run the profiler: `all`, `first` (rank 0), or a list of global ranks."""
    profiler: bool = True
    """`off`: no profiler runs in the role's processes. Engines have a switch of their own:
    `engine.profiler`."""
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    """Options of the role's inference engines."""
