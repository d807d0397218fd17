"""All sources of a process, by the names that the reasons for their absence use.

To add a counter here: write a `CounterSource` in `load`, `devices` or a module of its own, and a function
that returns it, in a list, or raises `AbsentError` with the reason; add that function to `openers`, for a
counter of the whole host through `host.only`; put the counter into the table of docs/counters.md. The report
shows every counter that it finds: only one by which it also judges has a name in `stepscope.files.counters`.
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
    """Return the openers of a process' sources, in the order of a report.

    Args:
        log: The log of its spans, whose event loops are watched.
        step_folder: Folder of the capture's step: one process of each host samples the host for it.
        owner: Whether the process opened the capture. It looks at the cluster as well.
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
    """Return the entry points of other packages, by name."""
    from importlib.metadata import entry_points  # import time: 15 ms

    return tuple(sorted(entry_points(group="stepscope.counters"), key=lambda point: point.name))


def _ascend_npus() -> Iterable[CounterSource]:
    """Return the counters of this host's NPUs; nothing in a process that has not loaded torch_npu."""
    if "torch_npu" not in sys.modules:
        return ()
    from stepscope._recording.counters.dcmi import ascend_npus  # import time: ctypes

    return ascend_npus()


class _Host:
    """The right to sample the host, asked for when the sources are opened."""

    def __init__(self, step_folder: str) -> None:
        self._step_folder = step_folder

    @cached_property
    def claim(self) -> HostClaim:
        return HostClaim(self._step_folder)

    def only(self, opener: Opener) -> Opener:
        """Return `opener` if this process has the right to sample the host, else one without sources."""
        return lambda: opener() if self.claim.taken else ()

    def installed(self, point: EntryPoint) -> Iterable[CounterSource]:
        """Return the sources of another package. Sources of the host are left out unless this process has the
        right.
        """
        try:
            sources: Iterable[CounterSource] = point.load()()
        except ours() as error:
            raise AbsentError(describe(error)) from error
        checked = list(map(_checked, sources))
        return [source for source in checked if source.scope != "host" or self.claim.taken]


_ALLOWED = {"kind": get_args(CounterKind), "scope": get_args(CounterScope)}


def _checked(source: CounterSource) -> CounterSource:
    """Return the counter of another package after a check of its fields. Raise AbsentError if a field is
    wrong.
    """
    named = f"{type(source).__module__}.{type(source).__qualname__}"
    for field in ("name", "unit", "kind", "scope"):
        value = getattr(source, field, None)
        allowed = _ALLOWED.get(field)
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            expected = "text" if allowed is None else ", ".join(allowed)
            raise AbsentError(f"{named}.{field} is {value!r}; allowed: {expected}")
    return source
