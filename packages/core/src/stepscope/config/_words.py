"""Types and similar names in plain words, for errors."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import msgspec

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    NoneType: "null",
}


def in_words(kind: object) -> str:
    """Return the values of a field of type `kind`: `a whole number >= 1`, `'continuous' or 'discrete'`..."""
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
    """Return the one of `known` that is most similar to `word`, or None if none is similar enough."""
    from difflib import get_close_matches  # 6 ms, for a message

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(
        str(word).lower(), by_lower, n=1, cutoff=cutoff
    )  # below 0.7: 'gpu' is near 'xpu'
    return by_lower[near[0]] if near else None


def fix_for(kind: object, value: object, *, from_text: bool = False) -> str:
    """Return how a value has to be written to be of type `kind`."""
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
