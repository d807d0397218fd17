"""The contract of a backend, and the lookup of a backend by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from stepscope.config import ProfileConfig
from stepscope.errors import BackendError
from stepscope.files.sidecar import ProcessInfo


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of recording: a whole capture (continuous) or one stage (discrete)."""

    step: int
    process: ProcessInfo
    stage: str | None
    """Stage that the window records, or None in continuous mode."""
    index: int
    """0, 1, 2...: the number of the window within its capture and stage, in this process."""


class SpanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a span that a backend may write into its own trace."""

    stage: str
    role: str
    span: int
    is_async: bool
    """True inside `async def`: use start/end pairs with an id there, never push/pop."""


def _nothing() -> None:
    pass


class PendingArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """A recording that was stopped and is not yet a file.

    `write(path)` writes all of it to the given temporary path: a file, or a folder (then `compress` is
    False). The exporter calls it once, on any thread, with no other `write` of the process beside it. It may
    hold the GIL and take seconds. The exporter then compresses (if `compress`), renames, and writes the
    sidecar. `discard()` frees what `write` uses. It is called if `write` raised or will never be called.
    """

    kind: str
    """The kind, as in `Artifact.kind`."""
    suffix: str
    """The suffix of the file that `write` makes: `.json`, `.pickle`. The exporter adds `.gz`."""
    write: Callable[[Path], None]
    compress: bool
    discard: Callable[[], None] = _nothing
    truncated: str | None = None
    lacking: str | Callable[[], str | None] | None = None
    """The requested part that is missing from the recording, with the reason, or None. The manifest then says
    `partial`. A function returns it once the file is written."""
    note: str | None = None
    """A fact about the recording that is no problem, or None."""
    ignored: dict[str, str] = {}
    options: dict[str, str | int | float | bool | None] = {}
    versions: dict[str, str] = {}


@runtime_checkable
class Backend(Protocol):
    """Profiler of this process. One running instance per process; constructed with the run's `ProfileConfig`.

    States: idle -> start -> running -> stop -> idle. `prepare` may be called at any time while idle, any
    number of times.
    """

    name: str

    def check(self) -> None:
        """Raise `BackendError` (with the fix) if this backend cannot work here. Start nothing."""

    def prepare(self) -> None:
        """Pay one-off costs (library loading, first-start initialisation) outside the step. Idempotent."""

    def start(self, window: Window) -> None:
        """Begin recording.

        Raises:
            ProfilerBusyError: this backend was not stopped, or another profiler (perhaps the user's own)
                records this process.
            BackendError: the profiler does not start. Nothing is left running.
            KeyboardInterrupt: at any moment, like other interrupts. `stop()` then ends whatever started.
        """

    def advance(self) -> None:
        """Advance the schedule at the end of a mini-batch. Do nothing without a schedule, or if idle."""

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return a marker for the trace around a span, or a null context if the backend has none.

        Cheap; it never raises.
        """

    def stop(self) -> list[PendingArtifact]:
        """End recording and return fast. Without a start, return []. Works from any thread.

        The recording up to this moment is never lost, partial windows included.

        Raises:
            BackendError: nothing was recorded, with the reason. The backend is idle.
        """


_METHODS = ("advance", "check", "prepare", "range", "start", "stop")


def load_backend(name: str, config: ProfileConfig) -> Backend:
    """Return the backend registered under `name`.

    Raises:
        BackendError: no such backend is registered (the message names the registered ones, and what to
            install), or it lacks methods of `Backend`.
    """
    backend = _factory(name)(config)
    lacking = [method for method in _METHODS if not callable(getattr(backend, method, None))]
    if lacking:
        raise BackendError(
            f"backend {name!r} ({type(backend).__qualname__}) lacks {', '.join(lacking)}. "
            "Fix: install a version of it that fits this stepscope"
        )
    return backend


@cache  # reading the entry points takes 10 ms
def _factory(name: str) -> Callable[[ProfileConfig], Backend]:
    from importlib.metadata import entry_points  # its import takes 20 ms, paid when a profiler is wanted

    registered = {point.name: point for point in entry_points(group="stepscope.backends")}
    if name not in registered:
        raise BackendError(
            f"no backend {name!r} is installed; installed: {', '.join(sorted(registered)) or 'none'}. "
            "Fix: install the package that registers it under `stepscope.backends`, on this host too"
        )
    factory: Callable[[ProfileConfig], Backend] = registered[name].load()
    return factory
