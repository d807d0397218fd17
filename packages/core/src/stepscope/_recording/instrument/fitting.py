"""Entries of a preset without the arguments that the installed version of its framework no longer has.

An entry loses the values of such arguments, such as a label, and its calls are recorded without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import NamedTuple

import msgspec

from stepscope._recording.instrument import calls
from stepscope._recording.instrument.call_arguments import Arguments, Condition
from stepscope._recording.instrument.calls import Timing
from stepscope._recording.instrument.step_boundaries import Boundary
from stepscope.config._instrument import paths_in
from stepscope.errors import ConfigError

_ANY = Condition({}, {})


class Fitted(NamedTuple):
    """The entries of a function, without the paths that begin with no argument of the function."""

    timings: tuple[Timing, ...]
    boundary: Boundary | None
    lost: dict[str, ConfigError]
    """{path that begins with no argument: error that names the arguments}."""


def fitted(fn: FunctionType, timings: Sequence[Timing], boundary: Boundary | None, target: str) -> Fitted:
    """Return the entries of `fn` without the paths that begin with no argument of `fn`."""
    paths = _Paths(Arguments(fn), target)
    made = [paths.kept(timing) for timing in timings if paths.gone(_all_in([timing.engine])) == []]
    known = [timing for timing in made if paths.gone(timing.condition.paths, after=False) == []]
    for layer in calls.LAYERS:
        unknown = [timing for timing in made if timing.kind in layer and timing not in known]
        if unknown and not any(timing.kind in layer for timing in known):
            known.append(_for_any_call(unknown))
    usable = tuple(timing for timing in known if timing.kind != "consume" or timing.id)
    return Fitted(usable, boundary and paths.kept_boundary(boundary), paths.lost)


class _Paths:
    """The paths of a function's entries, checked against its arguments."""

    def __init__(self, arguments: Arguments, target: str) -> None:
        self._arguments = arguments
        self._target = target
        self.lost: dict[str, ConfigError] = {}

    def gone(self, paths: Iterable[str], *, after: bool = True) -> list[str]:
        """Return the paths that begin with no argument of the function."""
        return [path for path in paths if not self._is_there(path, after)]

    def kept(self, timing: Timing) -> Timing:
        """Return an entry without the removed paths. Its condition is left unchanged."""
        return timing._replace(
            id=() if self.gone(_all_in(timing.id)) else timing.id,
            policy_version=self._one(timing.policy_version),
            request=self._one(timing.request),
            turn=self._one(timing.turn),
            tool=self._one(timing.tool),
            replica=self._one(timing.replica),
            values=self._named(timing.values),
        )

    def kept_boundary(self, boundary: Boundary) -> Boundary:
        """Return a boundary without the removed paths. Its condition is left unchanged."""
        entry = boundary.entry
        left = msgspec.structs.replace(
            entry,
            number=self._one(entry.number, after=False),
            workers=self._named(entry.workers, after=False),
            engines=self._named(entry.engines, after=False),
        )
        return boundary._replace(entry=left)

    def _one(self, path: str | None, *, after: bool = True) -> str | None:
        return path if path is not None and self._is_there(path, after) else None

    def _named(self, paths: Mapping[str, str], *, after: bool = True) -> dict[str, str]:
        return {name: path for name, path in paths.items() if self._is_there(path, after)}

    def _is_there(self, path: str, after: bool) -> bool:
        try:
            self._arguments.check(path, self._target, after=after)
        except ConfigError as error:
            self.lost[path] = error
            return False
        return True


def _all_in(texts: Iterable[str | None]) -> list[str]:
    """Return all paths in texts of an entry, such as a label with `{path}` in it."""
    return [path for text in texts if text for path in paths_in(text)]


def _for_any_call(timings: Sequence[Timing]) -> Timing:
    """Return the first of these entries for all calls, because the calls of each entry can no longer be told
    apart.

    The returned entry has no stage if the entries have several.
    """
    first = timings[0]._replace(condition=_ANY)
    labels = {(timing.role, timing.stage) for timing in timings}
    return first if len(labels) == 1 else first._replace(stage=None)
