"""What a backend is, and how one is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import msgspec

from stepscope.config import ProfileConfig
from stepscope.errors import BackendError
from stepscope.files.sidecar import ProcessInfo


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of recording: a whole capture (continuous) or one stage (discrete)."""

    step: int
    process: ProcessInfo
    stage: str | None
    """None in continuous mode."""
    index: int
    """0, 1, 2...: the how-manieth window of this (capture, stage) in this process."""


class SpanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend may write into its own trace about a span."""

    stage: str
    role: str
    span: int
    is_async: bool
    """True inside `async def`: only start/end pairs with an id are right there, never push/pop."""


def _nothing() -> None:
    pass


class PendingArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """A recording that was stopped and is not yet a file.

    `write(path)` writes it, whole, to the temporary path it is given: a file, or a folder (then `compress` is
    False). It is called once, on any thread, at most once in a process at a time; it may hold the GIL and
    take seconds. The exporter compresses (when `compress`), renames, and writes the sidecar. `discard()`
    frees what `write` uses: when it will never be called, or has raised.
    """

    kind: str
    """As `Artifact.kind`."""
    suffix: str
    """`.json`, `.pickle`: of what `write` writes. `.gz` is added by the exporter when it compresses."""
    write: Callable[[Path], None]
    compress: bool
    discard: Callable[[], None] = _nothing
    truncated: str | None = None
    lacking: str | None = None
    """What is not in it that was asked for, and why; the manifest then says `partial`."""
    ignored: dict[str, str] = {}
    options: dict[str, str | int | float | bool | None] = {}
    versions: dict[str, str] = {}


@runtime_checkable
class Backend(Protocol):
    """Records this process. One running instance per process; constructed with the run's `ProfileConfig`.

    States: idle -> start -> running -> stop -> idle. `prepare` may be called at any time while idle, any
    number of times.
    """

    name: str

    def check(self) -> None:
        """Raises `BackendError` (with the fix) when this backend cannot work here. Starts nothing."""
        ...

    def prepare(self) -> None:
        """Pays one-off costs (library loading, first-start initialisation) outside the step. Idempotent."""
        ...

    def start(self, window: Window) -> None:
        """Begins recording.

        Raises:
            ProfilerBusyError: this backend was not stopped, or another profiler, the user's own included, has
                this process.
            BackendError: it does not start. Nothing is left running.
            KeyboardInterrupt: and the like, at any moment. `stop()` then ends whatever has started.
        """
        ...

    def advance(self) -> None:
        """One mini-batch is done; walks the schedule. A no-op without a schedule or when idle."""
        ...

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """A marker in the trace around a span. Cheap; a null context where the backend has none. Never
        raises.
        """
        ...

    def stop(self) -> list[PendingArtifact]:
        """Ends recording and returns fast. What was recorded by then is never lost, partial windows included.
        Without a start it returns []. Works from any thread.

        Raises:
            BackendError: nothing was recorded, and why. The backend is idle.
        """
        ...


_METHODS = ("advance", "check", "prepare", "range", "start", "stop")


def load_backend(name: str, config: ProfileConfig) -> Backend:
    """The backend registered under `name`.

    Raises:
        BackendError: none is registered (names those that are and what to install), or it is not a `Backend`.
    """
    from importlib.metadata import entry_points  # 20 ms, paid when a profiler is wanted

    found = {point.name: point for point in entry_points(group="stepscope.backends")}
    if name not in found:
        raise BackendError(
            f"no backend {name!r} is installed; installed: {', '.join(sorted(found)) or 'none'}. "
            "Fix: install the package that registers it under `stepscope.backends`, on this host too"
        )
    made = cast(Callable[[ProfileConfig], Backend], found[name].load())(config)
    lacking = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if lacking:
        raise BackendError(
            f"backend {name!r} ({type(made).__qualname__}) lacks {', '.join(lacking)}. "
            "Fix: install a version of it that fits this stepscope"
        )
    return made
