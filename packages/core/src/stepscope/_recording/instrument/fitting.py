"""Adaptation of a preset's entries to the installed version of the framework.

A function of that version may lack an argument that an entry reads. The calls are then recorded without the
values of that argument.
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
    """The entries of a function, without paths that begin with an argument which the function does not
    have.
    """

    timings: tuple[Timing, ...]
    boundary: Boundary | None
    lost: dict[str, ConfigError]
    """{removed path: error that lists the arguments}."""


def fitted(fn: FunctionType, timings: Sequence[Timing], boundary: Boundary | None, target: str) -> Fitted:
    """Return the entries of `fn`, without paths that begin with an argument which `fn` does not have."""
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
    """Check of paths against the arguments of a function."""

    def __init__(self, arguments: Arguments, target: str) -> None:
        self._arguments = arguments
        self._target = target
        self.lost: dict[str, ConfigError] = {}

    def gone(self, paths: Iterable[str], *, after: bool = True) -> list[str]:
        """Return the paths that begin with an argument which the function does not have."""
        return [path for path in paths if not self._is_there(path, after)]

    def kept(self, timing: Timing) -> Timing:
        """Return a copy of the entry without the removed paths. Its condition is unchanged."""
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
        """Return a copy of the boundary without the removed paths. Its condition is unchanged."""
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
    """Return all paths in texts of an entry, such as `{uid}_{attempt}`."""
    return [path for text in texts if text for path in paths_in(text)]


def _for_any_call(timings: Sequence[Timing]) -> Timing:
    """Return one entry for all calls, made of entries whose conditions cannot be read any more.

    It is the first entry, without its stage if the entries have different stages.
    """
    first = timings[0]._replace(condition=_ANY)
    labels = {(timing.role, timing.stage) for timing in timings}
    return first if len(labels) == 1 else first._replace(stage=None)
