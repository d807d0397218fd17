"""The protocol of a backend, and the lookup of a backend by name."""

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
    """One recording of a backend: a whole capture (continuous) or one stage (discrete)."""

    step: int
    process: ProcessInfo
    """Identity of this process: role, rank, host, pid."""
    stage: str | None
    """Stage that the window records, or None in continuous mode."""
    index: int
    """Number of the window within its capture and stage in this process: 0, 1, 2..."""


class SpanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a span that a backend may write into its own trace."""

    stage: str
    role: str
    span: int
    """Number of the span in the span file of its process."""
    is_async: bool
    """True inside `async def`, where ranges may interleave: use start and end with an id, never push and
    pop."""


def _nothing() -> None:
    pass


class PendingArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """A stopped recording that is not yet a file.

    `write(path)` writes the recording to a temporary path, as a file or a folder (a folder needs
    `compress=False`). The exporter calls `write` once, on any thread, and runs one `write` of a process at a
    time. `write` may hold the GIL for seconds. The exporter then compresses the file (if `compress`), renames
    it, and writes the sidecar. `discard()` frees the resources of `write`. The exporter calls `discard` if
    `write` raised or will never be called.
    """

    kind: str
    """The kind, as in `Artifact.kind`."""
    suffix: str
    """The suffix of the file that `write` writes: `.json`, `.pickle`. The exporter adds `.gz` if it
    compresses."""
    write: Callable[[Path], None]
    compress: bool
    """True to let the exporter compress the file with gzip."""
    discard: Callable[[], None] = _nothing
    truncated: str | None = None
    """Reason why the recording ended early, or None if it is complete."""
    lacking: str | Callable[[], str | None] | None = None
    """The requested part that the recording lacks, with the reason; the manifest then states `partial`. None
    if nothing is missing. A function is called after the file is written, and returns this text or None."""
    note: str | None = None
    """A remark about the recording that is not a problem, or None."""
    ignored: dict[str, str] = {}
    """{option without effect on this recording: reason}."""
    options: dict[str, str | int | float | bool | None] = {}
    """{option that the profiler ran with: value}, for the sidecar."""
    versions: dict[str, str] = {}
    """{library: version} of the libraries that a reader needs to know, for the sidecar."""


@runtime_checkable
class Backend(Protocol):
    """A profiler of this process. It is constructed with the run's `ProfileConfig`. One instance runs at a
    time.

    A backend is idle until `start`, runs until `stop`, and is idle again. `prepare` may be called any number
    of times while the backend is idle.
    """

    name: str
    """Name of the entry point, which is the value of `tool` in the configuration."""

    def check(self) -> None:
        """Check whether this backend can work in this process, without starting anything.

        Raises:
            BackendError: the backend cannot work. The message has the fix.
        """

    def prepare(self) -> None:
        """Pay one-time costs (load libraries, initialise the profiler) before a step begins. Idempotent."""

    def start(self, window: Window) -> None:
        """Begin recording.

        Raises:
            ProfilerBusyError: this backend was not stopped, or another profiler (perhaps the user's own)
                records this process.
            BackendError: the profiler did not start. Nothing is left running.
            KeyboardInterrupt: may be raised at any point, like other interrupts. `stop()` then ends what has
                started.
        """

    def advance(self) -> None:
        """Advance the schedule at the end of a mini-batch. Do nothing if idle, or if there is no schedule."""

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return a context that marks a span in the trace, or a null context if the backend has no markers.

        The call is cheap and never raises.
        """

    def stop(self) -> list[PendingArtifact]:
        """End the recording and return fast, from any thread. Return [] if there was no start.

        The recording up to this moment must be kept, even if the window is incomplete.

        Raises:
            BackendError: nothing was recorded. The message has the reason, and the backend is idle.
        """


_METHODS = ("advance", "check", "prepare", "range", "start", "stop")


def load_backend(name: str, config: ProfileConfig) -> Backend:
    """Return the backend registered under `name`.

    Raises:
        BackendError: no such backend is registered (the message names the registered backends, and what to
            install), or the backend lacks methods of `Backend`.
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
    from importlib.metadata import entry_points  # imported here, because the import takes 20 ms

    registered = {point.name: point for point in entry_points(group="stepscope.backends")}
    if name not in registered:
        raise BackendError(
            f"no backend {name!r} is installed; installed: {', '.join(sorted(registered)) or 'none'}. "
            "Fix: install the package that registers it under `stepscope.backends`, on this host too"
        )
    factory: Callable[[ProfileConfig], Backend] = registered[name].load()
    return factory
