"""The list of all counters.

To add a counter here: (1) Write a `CounterSource` in `load`, `devices` or a new module. (2) Write an opener:
a function that returns the counter in a list, or raises `AbsentError` with the reason. (3) Add the opener to
`openers`, through `host.only` if the counter is for the whole host. (4) Add the counter to the table in
docs/counters.md. The report shows all counters. A counter needs a name in `stepscope.files.counters` only if
the report draws conclusions from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, get_args

from stepscope._recording.counters.devices import nvidia_gpus
from stepscope._recording.counters.event_loops import EventLoops
from stepscope._recording.counters.load import (
    HostClaim,
    allocators,
    garbage,
    host_load,
    process_load,
    ray_store,
)
from stepscope._recording.counters.sampler import AbsentError, Opener
from stepscope._recording.process.failures import describe
from stepscope._recording.spans.maker import SpanMaker
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import CounterKind, CounterScope

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def openers(log: SpanMaker, step_folder: str, *, owner: bool) -> dict[str, Opener]:
    """Return {name: opener} of a process' counters, in the order of the report. If an opener raises, the
    manifest gives the reason under this name.

    Args:
        log: The log of the process' spans. Event loops in which spans run are watched.
        step_folder: Folder of the step. One process of each host samples the host for this folder.
        owner: True if the process opened the capture. The owner samples the Ray cluster too.
    """
    host = _Host(step_folder)
    sources: dict[str, Opener] = {
        "the process": process_load,
        "event loops": lambda: [EventLoops(log)],
        "the garbage collector": garbage,
        "torch's allocators": allocators,
    }
    if owner:
        sources["Ray"] = ray_store
    return sources | {
        "the host": lambda: host_load(host.claim),
        "NVIDIA GPUs": host.only(nvidia_gpus),
        "Ascend NPUs": host.only(_ascend_npus),
        **{f"stepscope.counters {point.name!r}": partial(host.installed, point) for point in _installed()},
    }


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages, sorted by name."""
    from importlib.metadata import entry_points  # imported here: 15 ms

    return tuple(sorted(entry_points(group="stepscope.counters"), key=lambda point: point.name))


def _ascend_npus() -> Iterable[CounterSource]:
    """Return the counters of this host's NPUs, or nothing if the process has not imported torch_npu."""
    if "torch_npu" not in sys.modules:
        return ()
    from stepscope._recording.counters.dcmi import ascend_npus  # imported here, because it needs ctypes

    return ascend_npus()


class _Host:
    """Openers of counters for the host, which return counters only in one process of the host."""

    def __init__(self, step_folder: str) -> None:
        self._step_folder = step_folder

    @cached_property
    def claim(self) -> HostClaim:
        return HostClaim(self._step_folder)

    def only(self, opener: Opener) -> Opener:
        """Return an opener that returns the counters of `opener`, or none if this process may not sample the
        host.
        """
        return lambda: opener() if self.claim.taken else ()

    def installed(self, point: EntryPoint) -> Iterable[CounterSource]:
        """Return the counters of another package, without counters of the host if this process may not sample
        it.
        """
        try:
            sources: Iterable[CounterSource] = point.load()()
        except ours() as error:
            raise AbsentError(describe(error)) from error
        checked = list(map(_checked, sources))
        return [source for source in checked if source.scope != "host" or self.claim.taken]


_ALLOWED = {"kind": get_args(CounterKind), "scope": get_args(CounterScope)}


def _checked(source: CounterSource) -> CounterSource:
    """Check the fields of a counter of another package, and return the counter. Raise `AbsentError` if a
    field is wrong.
    """
    named = f"{type(source).__module__}.{type(source).__qualname__}"
    for field in ("name", "unit", "kind", "scope"):
        value = getattr(source, field, None)
        allowed = _ALLOWED.get(field)
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            expected = "text" if allowed is None else ", ".join(allowed)
            raise AbsentError(f"{named}.{field} is {value!r}; allowed: {expected}")
    return source
