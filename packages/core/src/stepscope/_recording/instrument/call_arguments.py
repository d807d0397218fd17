"""Values at paths, such as `self.state.global_step`, that begin with an argument or the result of a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from stepscope.errors import ConfigError, ours

Number: TypeAlias = int | float | bool

SELF = "self"
RESULT = "result"
"""The first part of a path that begins with the result of the call."""
MAX_NAME = 128
"""Largest length of an id or a name, in characters."""
_LENGTH = "len("
_OFFSET = re.compile(r"[+-]\d+$")


class Arguments:
    """Reader of values at paths, for the calls of one function."""

    def __init__(self, fn: FunctionType) -> None:
        # Only names and defaults are stored, because the reader may be pickled with a class, and annotations
        # may not be picklable.
        kind = inspect.Parameter
        parameters = list(inspect.signature(fn).parameters.values())
        positional = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
        self._positions = {p.name: at for at, p in enumerate(parameters) if p.kind in positional}
        self._names = [p.name for p in parameters if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
        self._defaults = {p.name: p.default for p in parameters if p.default is not kind.empty}
        self._star = next((p.name for p in parameters if p.kind is kind.VAR_POSITIONAL), None)
        self._stars = next((p.name for p in parameters if p.kind is kind.VAR_KEYWORD), None)
        self._hidden = self._star is not None and not self._positions
        """True for a decorator's `wrapper(*args, **kwargs)`. The first argument is then `self`."""

    def check(self, path: str, target: str, *, after: bool = False) -> None:
        """Raise `ConfigError` if a path does not begin with an argument of the function.

        Args:
            after: True if the path is read after the call, so that it may begin with the result.
        """
        first = _first_of(path)
        known = [*self._names, *filter(None, (self._star, self._stars)), *([SELF] if self._hidden else ())]
        if first not in known and self._stars is None and not (after and first == RESULT):
            allowed = f"paths from its arguments: {', '.join(known) or 'it has none'}"
            fix = "begin the path with one of them" + (f", or with {RESULT}" if after else "")
            raise ConfigError(f"instrument({target!r})", path, allowed, fix)

    def read(
        self, path: str, args: Sequence[object], kwargs: Mapping[str, object], returned: Sequence[object] = ()
    ) -> object:
        """Return the value at `path`.

        A path is a name followed by attributes, keys and indexes: `self.state.steps.0`. It may also be the
        length of a value (`len(batch.rows)`), and a number may be added or subtracted (`step+1`).

        Args:
            returned: The result of the call as the only item; empty before the call.

        Raises:
            LookupError: There is no value at the path.
        """
        offset = _OFFSET.search(path)
        if offset is not None:
            number = number_of(self.read(path[: offset.start()], args, kwargs, returned))
            return None if number is None else number + int(offset[0])
        if path.startswith(_LENGTH):
            value = self.read(path[len(_LENGTH) : -1], args, kwargs, returned)
            try:
                return len(value)  # type: ignore[arg-type]  # any object of the user's
            except TypeError:
                raise LookupError(f"a {type(value).__name__} has no length") from None
        first, *rest = path.split(".")
        value = returned[0] if returned and first == RESULT else self._first(first, args, kwargs)
        for name in rest:
            value = _below(value, name)
        return value

    def number(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> int:
        """Return the whole number at `path`, which may end in `+1`.

        Raises:
            LookupError: There is no whole number at the path.
        """
        place, _, more = path.partition("+")
        value = self.read(place, args, kwargs)
        if isinstance(value, bool) or not isinstance(value, int):
            raise LookupError(f"{place} is {value!r}, not a whole number")
        return value + int(more or 0)

    def _first(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        position = self._positions.get(name)
        if position is not None and position < len(args):
            return args[position]
        if name in kwargs:
            return kwargs[name]
        if name in self._defaults:
            return self._defaults[name]
        if name == self._star:
            return args[len(self._positions) :]
        if name == self._stars:
            return {key: value for key, value in kwargs.items() if key not in self._names}
        if name == SELF and self._hidden and args:
            return args[0]
        raise LookupError(f"no {name!r} among the arguments")


class Condition(NamedTuple):
    """A condition on a call. All values at the paths of `where` must equal the given values, and both paths
    of each pair in `same` must lead to the same object.
    """

    where: Mapping[str, object]
    same: dict[str, str]

    def check(self, arguments: Arguments, target: str) -> None:
        """Raise `ConfigError` if a path does not begin with an argument of the function."""
        for path in self.paths:
            arguments.check(path, target)

    @property
    def paths(self) -> list[str]:
        """All paths of the condition."""
        return [*self.where, *self.same, *self.same.values()]

    @property
    def any_call(self) -> bool:
        """True if every call meets the condition."""
        return not (self.where or self.same)

    def holds(self, arguments: Arguments, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Return whether a call meets the condition. Return False if there is no value at a path."""
        try:
            return all(
                _equal(arguments.read(path, args, kwargs), value) for path, value in self.where.items()
            ) and all(
                arguments.read(one, args, kwargs) is arguments.read(other, args, kwargs)
                for one, other in self.same.items()
            )
        except ours():  # attributes of the user's objects may raise anything
            return False


def is_result(path: str) -> bool:
    """Return whether a path begins with the result of the call."""
    return _first_of(path) == RESULT


def _first_of(path: str) -> str:
    return _OFFSET.sub("", path).removeprefix(_LENGTH).rstrip(")").partition(".")[0]


def number_of(value: object) -> Number | None:
    """Return `value` as a plain number, boolean or None. Scalars of numpy and torch are converted.

    Raises:
        LookupError: `value` is something else, or a tensor on a device, where a read would wait for the
            device.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value if type(value) in (bool, int, float, type(None)) else _plain(value)
    device = str(getattr(value, "device", "cpu"))
    if device != "cpu":
        raise LookupError(f"it is a {type(value).__name__} on {device}, which is not waited for")
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        item: object = value.item()
        if isinstance(item, (bool, int, float)):
            return item
    raise LookupError(f"it is a {type(value).__name__}, not a number")


def version_of(value: object) -> Number | None:
    """Return the version of the weights in `value`, or None if `value` is None, an empty list, or an array
    without a version.

    Args:
        value: A number, a text of digits, a list whose first item is the version, or an array. The version in
            an array is the first item that is not negative; of several rows, the smallest version.

    Raises:
        LookupError: `value` is something else.
    """
    if isinstance(value, list | tuple):
        return version_of(value[0]) if value else None
    if getattr(value, "ndim", 0) and str(getattr(value, "device", "cpu")) == "cpu":
        return _oldest(value)
    return int(value) if isinstance(value, str) and value.isdecimal() else number_of(value)


def _oldest(versions: Any) -> Number | None:
    """Return the first item of an array that is not negative, or None. Tokens that no policy has generated
    have the version -1.

    If the array has several rows, return the smallest of the rows' versions.
    """
    if versions.ndim > 1:
        return min((row for row in map(_oldest, versions) if row is not None), default=None)
    known = versions[versions >= 0]
    return number_of(known[0]) if len(known) else None


def name_of(value: object) -> str:
    """Return a text or an integer as a name, cut to 128 characters.

    Raises:
        LookupError: `value` is something else, or empty text.
    """
    if isinstance(value, str):
        text = str(value)
    else:
        number = number_of(value)
        if number is None or isinstance(number, (bool, float)):
            raise LookupError(f"it is {number}, not a name")
        text = str(number)
    if not text:
        raise LookupError("it is empty")
    return text[:MAX_NAME]


def request_of(value: object) -> str:
    """Return a request id, as `name_of` does.

    Raises:
        LookupError: as `name_of`; also if `value` has spaces, because it may be a prompt.
    """
    name = name_of(value)
    if len(name.split()) != 1:
        raise LookupError("it is a text with spaces, and no name of a request has any")
    return name


def names_of(value: object) -> list[str]:
    """Return the names in `value`: a list, a one-dimensional array, or a single name. Each is converted by
    `name_of`.
    """
    return [name_of(item) for item in _items(value)]


def versions_of(value: object) -> list[Number | None]:
    """Return the versions in `value`: a list, a one-dimensional array, or a single version. Each is converted
    by `version_of`.
    """
    return [version_of(item) for item in _items(value)]


def texts_of(text: str, columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return `text` once for each row of the longest column, with each `{path}` replaced by the path's name
    in the row. Return an empty list if a column is empty.

    Args:
        columns: {path: its names, one for each row}. The names of a shorter column are repeated.
    """
    count = max(map(len, columns.values()), default=0)
    filled = [text] * count if all(columns.values()) else []
    for path, names in columns.items():
        filled = [item.replace(f"{{{path}}}", names[at % len(names)]) for at, item in enumerate(filled)]
    return filled


def _items(value: object) -> Sequence[object]:
    if getattr(value, "ndim", None) == 1 and str(getattr(value, "device", "cpu")) == "cpu":
        value = value.tolist()  # type: ignore[attr-defined]  # numpy or torch
    return value if isinstance(value, (list, tuple)) else [value]


def _plain(value: object) -> Number:
    """Return an enum member or a numpy.float64 as a plain number."""
    return int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]  # else a float


def _equal(actual: object, value: object) -> bool:
    # Types are compared first, so that 1 is not True and tensors are not compared.
    return type(actual) is type(value) and actual == value


def _below(owner: object, name: str) -> object:
    if isinstance(owner, Mapping) and name in owner:
        value: object = owner[name]
        return value
    if isinstance(owner, (list, tuple)) and not name.isdecimal() and not hasattr(owner, name):
        return [_below(item, name) for item in owner]
    try:
        # A number is an index of a list, or a key that is a number.
        return owner[int(name)] if name.isdecimal() else getattr(owner, name)  # type: ignore[index]
    except (AttributeError, TypeError, IndexError):
        raise LookupError(f"no {name!r} in a {type(owner).__name__}") from None
