"""Conversion of given values into the checked fields of a section, and the messages for wrong values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

import msgspec

from stepscope.errors import ConfigError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Seconds: TypeAlias = Positive
Parser: TypeAlias = Callable[[object, str], object]
"""(given value, dotted name of the field) -> the field's value. Raises `ConfigError`."""


class Mistakes:
    """A collection of `ConfigError`s that are raised together as one."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Collect a `ConfigError` that is raised in the block, and continue after the block."""
        try:
            yield
        except ConfigError as error:
            self._found += [only(error), *error.also]

    def raise_any(self) -> None:
        if self._found:
            first, *others = self._found
            raise ConfigError(first.field, first.value, first.allowed, first.fix, others)


def only(error: ConfigError) -> ConfigError:
    """Return a copy of `error` without the errors in its `also`."""
    return ConfigError(error.field, error.value, error.allowed, error.fix)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A struct that checks its fields, and converts them to their normal form, on construction."""

    _at: ClassVar[str] = ""
    """Dotted path of the section in the configuration. Errors show this path if the section is constructed on
    its own."""
    _parsers: ClassVar[Mapping[str, Parser]] = {}
    """{field: parser}, for fields that accept values of other types than their own."""

    def __post_init__(self) -> None:
        section, mistakes = type(self), Mistakes()
        for name in kinds(section):
            with mistakes.noted():
                given = getattr(self, name)
                taken = take_field(section, name, given, section._at)
                if taken is not given:
                    msgspec.structs.force_setattr(self, name, taken)
        mistakes.raise_any()

    def replace(self: SectionT, **changes: object) -> SectionT:
        """Return a copy with changed values, which are checked. (`msgspec.structs.replace` checks changed
        values only since 0.21.)

        Raises:
            ConfigError: as when a section is made.
        """
        kept = {name: getattr(self, name) for name in self.__struct_fields__}
        return build(type(self), kept | changes, self._at)


SectionT = TypeVar("SectionT", bound=Section)


@cache
def kinds(section: type[Section]) -> dict[str, object]:
    """Return {field: its resolved type} of a section, in the order of the class body."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def section_of(kind: object) -> type[Section] | None:
    """Return the section class in the type `kind`, also in a union such as `ScheduleConfig | None`; None if
    `kind` has no section.
    """
    union = get_origin(kind) in (Union, UnionType)
    for option in get_args(kind) if union else (kind,):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def build(section: type[SectionT], data: object, at: str) -> SectionT:
    """Construct a section from a mapping.

    Args:
        at: The mapping's dotted path in the configuration; `""` for the whole configuration.

    Raises:
        ConfigError: `data` is not a mapping, or has an unknown key or a wrong value. The error lists all such
            fields.
    """
    if not isinstance(data, Mapping):
        fix = "write {} or leave it out, for the defaults" if data is None else "write its fields below it"
        raise ConfigError(at or "the configuration", data, in_words(section), fix)
    taken, mistakes = {}, Mistakes()
    for key, value in data.items():
        with mistakes.noted():
            if key not in kinds(section):
                raise _unknown_key(section, key, value, at)
            taken[key] = take_field(section, key, value, at)
    mistakes.raise_any()
    make = cast(Callable[..., SectionT], section)
    return make(**taken)


def take_field(section: type[Section], name: str, value: object, at: str) -> object:
    """Return `value` in the normal form of the field `name` of `section`."""
    field = dotted(at, name)
    parser = section._parsers.get(name)
    return parser(value, field) if parser else take(kinds(section)[name], value, field)


def take(kind: object, value: object, field: str) -> object:
    """Return `value` converted to type `kind`. The conversion is strict: `"1"` is not a number and 1 is not
    true.

    Raises:
        ConfigError: `value` is not of that type.
    """
    section = section_of(kind)
    if section is None:
        return convert(kind, value, field)
    if isinstance(value, section) or (value is None and kind is not section):
        return value
    return build(section, value, field)


def convert(kind: object, value: object, field: str, *, from_text: bool = False) -> object:
    """Return `value` converted to type `kind`, which contains no section. With `from_text`, "1" is a number,
    and "true" and "on" are booleans.
    """
    if value is False and "off" in get_args(kind):
        value = "off"  # YAML reads the word off as false
    elif from_text and kind is bool:
        value = {"on": True, "off": False}.get(str(value).lower(), value)  # as YAML reads these words
    try:
        taken: object = msgspec.convert(value, kind, strict=not from_text)
    except msgspec.ValidationError:
        taken = None
        wrong = True
    else:
        wrong = isinstance(taken, float) and not isfinite(taken)  # JSON has no infinity
    if wrong:
        raise ConfigError(field, value, in_words(kind), fix_for(kind, value, from_text=from_text))
    return taken


def items_of(value: object) -> list[object] | None:
    """Return the items of an iterable, or of a text with commas; None if `value` is neither."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        return list(value)
    return None


def dotted(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _unknown_key(section: type[Section], key: object, value: object, at: str) -> ConfigError:
    """Return the error for a key that `section` lacks, with a suggestion: a similar key, or the same key in
    another section.
    """
    known = kinds(section)
    elsewhere = (dotted(other._at, key) for other in Section.__subclasses__() if key in kinds(other))
    near = closest(key, known, cutoff=0.85) or next(elsewhere, None) or closest(key, known)
    meant = f"did you mean {near!r}?" if near else "leave it out"
    allowed = f"the keys {', '.join(known)}" + (f" in {at}" if at else "")
    return ConfigError(dotted(at, key), value, allowed, f"there is no {dotted(at, key)!r}; {meant}")


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    NoneType: "null",
}


def in_words(kind: object) -> str:
    """Describe the values of type `kind`: `a whole number >= 1`, `'continuous' or 'discrete'`..."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return either([repr(choice) for choice in arguments])
    if origin is Annotated:
        return f"{in_words(arguments[0])} {_bound(arguments[1])}"
    if origin in (Union, UnionType):
        return either([in_words(option) for option in arguments])
    if origin is tuple:
        return f"a list of {in_words(arguments[0])}"
    if origin is dict:
        return f"a mapping of names to {in_words(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"a mapping with the keys {', '.join(kind.__struct_fields__)}"
    return next((words for known, words in _WORDS.items() if kind is known), str(kind))


def either(choices: list[str]) -> str:
    return ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]


def closest(word: object, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Return the name in `known` that is most similar to `word`, or None if no name is similar enough."""
    from difflib import get_close_matches  # imported here, because only error messages need it (6 ms)

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(
        str(word).lower(), by_lower, n=1, cutoff=cutoff
    )  # a lower cutoff would suggest 'xpu' for 'gpu'
    return by_lower[near[0]] if near else None


def fix_for(kind: object, value: object, *, from_text: bool = False) -> str:
    """Return advice on how to write a value of type `kind` in place of `value`."""
    choices = [choice for option in (kind, *get_args(kind)) for choice in _choices(option)]
    if choices:
        near = closest(value, choices) if isinstance(value, str) else None
        return f"did you mean {near!r}?" if near else "write one of them"
    if isinstance(value, str) and not from_text:
        return "write the value itself, without quotes"
    if isinstance(value, bool | int | float) and kind is str:
        return "put it in quotes"
    return f"replace it with {in_words(kind)}"


def _choices(kind: object) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _bound(meta: msgspec.Meta) -> str:
    lowest = f">= {meta.ge}" if meta.ge is not None else f"> {meta.gt}"
    return lowest if meta.le is None else f"{lowest} and <= {meta.le}"
