"""Values that the arguments of a call lead to, by paths such as `self.state.global_step`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import NamedTuple

from stepscope.errors import ConfigError


class Arguments:
    """Reader of paths in the calls of one function."""

    def __init__(self, fn: FunctionType) -> None:
        signature = inspect.signature(fn)
        # Without annotations: it may travel with its class by value, and they may not.
        bare = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
        self._signature = inspect.Signature(bare)

    def check(self, path: str, target: str) -> None:
        """Raise `ConfigError` for a path that does not begin with an argument."""
        first = path.partition(".")[0].partition("+")[0]
        kinds = {parameter.kind for parameter in self._signature.parameters.values()}
        if first not in self._signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            allowed = f"paths from its arguments: {', '.join(self._signature.parameters) or 'it has none'}"
            raise ConfigError(f"instrument({target!r})", path, allowed, "begin the path with one of them")

    def read(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the value at `path`: attributes, or keys of mappings.

        Raises:
            LookupError: There is none.
        """
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        first, *rest = path.split(".")
        value: object = bound.arguments
        for name in (first, *rest):
            value = _below(value, name)
        return value

    def number(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> int:
        """Return the whole number at `path`, which may end in `+1`.

        Raises:
            LookupError: There is none.
        """
        place, _, more = path.partition("+")
        value = self.read(place, args, kwargs)
        if isinstance(value, bool) or not isinstance(value, int):
            raise LookupError(f"{place} is {value!r}, not a whole number")
        return value + int(more or 0)


class Condition(NamedTuple):
    """Condition on a call: values that are equal, and values that are one object."""

    where: Mapping[str, object]
    same: dict[str, str]

    def check(self, arguments: Arguments, target: str) -> None:
        """Raise `ConfigError` for a path that does not begin with an argument."""
        for path in (*self.where, *self.same, *self.same.values()):
            arguments.check(path, target)

    @property
    def any_call(self) -> bool:
        """True if every call meets it."""
        return not (self.where or self.same)

    def holds(self, arguments: Arguments, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Return whether a call meets it. A path that leads nowhere fails."""
        try:
            return all(
                _equal(arguments.read(path, args, kwargs), value) for path, value in self.where.items()
            ) and all(
                arguments.read(one, args, kwargs) is arguments.read(other, args, kwargs)
                for one, other in self.same.items()
            )
        except Exception:  # the arguments are theirs, and so is what their attributes do
            return False


def _equal(actual: object, value: object) -> bool:
    # By type first: 1 is not true, and a tensor is not compared.
    return type(actual) is type(value) and actual == value


def _below(owner: object, name: str) -> object:
    if isinstance(owner, Mapping) and name in owner:
        value: object = owner[name]
        return value
    try:
        return getattr(owner, name)
    except AttributeError:
        raise LookupError(f"no {name!r} in a {type(owner).__name__}") from None
