"""Contracts of engine profilers and adapters, and the search for an adapter by name or by engine object."""

from __future__ import annotations

import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import msgspec

from stepscope.backends.counters import CounterSource
from stepscope.config import ProfileConfig
from stepscope.errors import EngineError, ours
from stepscope.files.passes import PassFile
from stepscope.files.sidecar import Artifact

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from stepscope.engines.waiting import Waiting

INSTALL_AN_ADAPTER = "pip install 'stepscope[vllm]', 'stepscope[sglang]', or the package that brings it"
"""Fix for a missing adapter, quoted in errors."""
log = logging.getLogger("stepscope")


class Iterations(msgspec.Struct, frozen=True, kw_only=True):
    """A window of engine iterations (forward passes, not tokens), counted from the start of a capture."""

    start: int = 0
    """Number of iterations to skip before recording."""
    count: int | None = None
    """The number of iterations to record; None to record until the capture ends."""
    running: int | None = None
    """The number of running requests at which the window opens; None to open it with the capture."""


class EngineCapture(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about one capture that an engine profiler needs. Sent by pickle and by JSON."""

    step: int
    run_id: str
    """Id of the run, which the sidecars repeat."""
    out_dir: str
    """Absolute path of the folder `<step>/traces/rollout/replica<n>`. The profiler creates the folder on the
    host that writes the files, which may be another host."""
    step_dir: str
    """Absolute path of the step's folder. `Artifact.path` is relative to this folder."""
    name: str
    """Name or prefix of the profile, distinct for each capture of a run."""
    replica: int
    activities: tuple[str, ...] = ("cpu", "cuda")
    """Activities to record, as in `torch.activities`. An adapter leaves out activities that the engine's
    device lacks."""
    with_stack: bool = False
    """True to record Python stacks. This option and the next ones have the meaning of torch.profiler."""
    record_shapes: bool = False
    profile_memory: bool = False
    iterations: Iterations = Iterations()
    by_stage: bool = False
    """True to write prefill and decode to separate files."""
    merge: bool = False
    """True to let the engine merge the files of its ranks."""
    passes: int = 0
    """Largest number of forward passes to note in a file (see `files.passes`); 0 for none."""
    profiler: bool = True
    """False if the capture notes only forward passes, and the engine's own profiler does not run."""
    seconds: float | None = None
    """Seconds after which a profiler that has a timer ends the recording by itself, because the process that
    opened the capture may be gone; None for no limit."""
    stop_seconds: float | None = None
    """Longest time that the caller waits for `start`, and again for `stop`; None for no limit. `waited_s`
    takes precedence. A stop that takes longer goes on in the background."""
    ranks: tuple[int, ...] | None = None
    """Global GPU ranks whose files are wanted; None for all."""
    extra: dict[str, str | int | float | bool | None] = {}
    """Further options, passed to the engine. The adapter refuses options that the engine does not have."""


waited_s: ContextVar[float | None] = ContextVar("stepscope_waited_s", default=None)
"""Longest wait in s for the current `start` or `stop`; None for `EngineCapture.stop_seconds`. Writers:
captures and `RayRollout`."""


def patience_s(capture: EngineCapture) -> float:
    """Return how long the capture waits for the current `start` or `stop`, in s; infinite without a limit.

    `close(deadline_s=)` sets the limit of the stop that it causes.
    """
    waited = waited_s.get()
    seconds = capture.stop_seconds if waited is None else waited
    return math.inf if seconds is None else seconds


@runtime_checkable
class EngineProfiler(Protocol):
    """Starts and stops the profiler that an inference engine has. One instance per replica.

    States: idle -> start -> running -> stop -> idle. Stop without start returns []. A second start while
    running raises `EngineError`. A start that fails or is cancelled leaves nothing running.
    """

    replica: int | None
    """The replica's number; None to number the replica by its process and its position in
    `capture(engines=[...])`."""

    @property
    @abstractmethod
    def world_size(self) -> int | None:
        """Number of GPUs of the replica (tp * dp * pp), or None if unknown. Replica r owns the global ranks
        [r * size, (r + 1) * size).
        """

    @property
    def processes(self) -> int:
        """Number of processes that run this replica together, each with its own engine object and its own
        capture of the replica (vLLM's external launcher). 1 if one process owns the engine.
        """
        return 1

    @property
    def workers(self) -> Sequence[object]:
        """Handles of the Ray actors whose engines this profiler records. In these actors, a capture records
        spans and nothing else. Empty for engines in this process or behind HTTP.
        """
        return ()

    @abstractmethod
    def check(self) -> None:
        """Check before the run that the engine's version is supported and its profiler is enabled.

        May block, so do not call this method on an event loop.

        Raises:
            EngineError: the check failed. The message has the fix.
        """

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        """Return {option: reason} for the options of `capture` that will have no effect. Called before the
        run, after `check`. May block.

        Raises:
            EngineError: the engine cannot record this capture at all. The message has the fix.
        """
        return {}

    @abstractmethod
    async def start(self, capture: EngineCapture) -> None:
        """Start recording. Return when every worker of the replica has begun.

        Raises:
            EngineError: the engine already records, or did not start. Nothing is left running.
        """

    @abstractmethod
    async def stop(self) -> list[Artifact]:
        """Stop recording. Return the files, which are complete on disk. A file's `rank` is None if unknown.

        A stop that is cancelled may go on in the background. Readers find the files by their sidecars.

        Raises:
            EngineError: nothing was recorded, or files are missing or incomplete. The message has the reason.
        """

    def counters(self) -> Sequence[CounterSource]:
        """Return the counters of the engine for one capture; empty if there are none.

        The caller samples the counters in the returned order, on one thread, and closes them.
        """
        return ()

    @property
    def ignored(self) -> Mapping[str, str]:
        """{option: reason} for options that had no effect on the latest capture. Three further keys are
        possible: `artifacts`, if another tool writes the files of a successful capture; `late`, if files may
        still come after the stop; `idle`, if the engine ran nothing.
        """


class EngineProfilerBase(EngineProfiler):
    """Base class with the parts that engine profilers share. Inherit, and add `world_size`, `check`, `start`
    and `stop`.
    """

    def __init__(self, replica: int | None = None) -> None:
        self.replica = replica
        self._ignored: dict[str, str] = {}
        self._waiting: Waiting | None = None

    async def open(self, capture: EngineCapture) -> None:
        """Start recording, or wait in the background for `iterations.running` requests and start then."""
        if self._waiting is not None:
            raise EngineError("this engine already waits for requests to record. Fix: stop() it first")
        if capture.iterations.running is None:
            await self.start(capture)
        else:
            from stepscope.engines.waiting import Waiting  # import time: asyncio

            self._waiting = Waiting(self, capture, capture.iterations.running)

    async def close(self) -> list[Artifact]:
        """Stop what `open` began. If the window never opened, return [] and set the reason in `ignored`."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not await waiting.end():
            self._ignored = waiting.why()
            return []
        return await self.stop()

    def sample_apart(self) -> None:
        """If the engine runs in another process, make that process sample its counters between captures."""

    def weakly(self) -> Callable[[], EngineProfilerBase | None]:
        """Return a function that returns a profiler of this engine, or None once the engine is gone.

        The flight recorder keeps the function. If the profiler refers to the engine, override this method,
        because the function must hold no strong reference to the engine.
        """
        return lambda: self

    def keep_passes(self, memory_mb: int) -> bool:
        """Make the engine of this process keep its latest forward passes, for the flight recorder.

        Args:
            memory_mb: Memory in MB that the passes may take.

        Returns:
            False if the engine cannot answer yet. A thread of stepscope calls this method until it returns
            True.
        """
        return True

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        """Return the passes since `start_ns` (unix ns) that the engine has kept; empty if it keeps none. May
        block.
        """
        return []

    @property
    def ignored(self) -> Mapping[str, str]:
        return self._ignored


async def open_window(profiler: EngineProfiler, capture: EngineCapture) -> None:
    """Start a profiler, or let it wait for `iterations.running` requests.

    Raises:
        EngineError: the start failed, or the profiler cannot wait.
    """
    if isinstance(profiler, EngineProfilerBase):
        await profiler.open(capture)
    elif capture.iterations.running is None:
        await profiler.start(capture)
    else:
        raise EngineError(
            "roles.rollout.engine.iterations.running needs a profiler that inherits from EngineProfilerBase. "
            "Fix: inherit from it, or leave `running` out"
        )


async def close_window(profiler: EngineProfiler) -> list[Artifact]:
    """Stop what `open_window` began, and return the files."""
    return await (profiler.close() if isinstance(profiler, EngineProfilerBase) else profiler.stop())


def refuse_second_start(running: EngineCapture | None) -> None:
    """Raise an error if a capture already runs on an engine.

    Raises:
        EngineError: `running` is not None.
    """
    if running is not None:
        raise EngineError(f"this engine already records step {running.step}. Fix: stop() it first")


def refuse_passes_alone(capture: EngineCapture) -> None:
    """Raise an error if a capture wants passes without the engine's own profiler.

    Raises:
        EngineError: `capture.profiler` is False.
    """
    if not capture.profiler:
        raise EngineError(
            "engine.profiler is passes, and this engine notes its passes only while its own profiler runs. "
            "Fix: engine.profiler: on, with engine.iterations.count: 1 for a small trace"
        )


class EngineFactory(Protocol):
    """An adapter: the object that an entry point in `stepscope.engines` loads. Inherit from it."""

    distributions: Sequence[str] = ()
    """Names of packages that may contain the engine. `run.json` records the packages' versions if the adapter
    is in use, and `stepscope doctor` compares the versions with the range in the adapter's `engine` extra."""

    builder: str = ""
    """`module:Class.method` that builds every engine; empty if the adapter needs no `arm`. Under `stepscope
    run`, `arm` is called before each call of that method if an `instrument` entry names the adapter. The
    top-level package of `module` must have the adapter's name."""

    def arm(self, config: ProfileConfig, settings: object) -> None:
        """Enable the profiler of an engine that is about to be built. Keep the settings of the user.

        Args:
            settings: First argument of the call of `builder`.
        """
        return

    @abstractmethod
    def recognises(self, engine: object) -> bool:
        """Return whether `engine` is one of this adapter's engines. Must not import the engine's library."""

    def serving(self, url: str, config: ProfileConfig) -> EngineProfiler:
        """Return the profiler of the server at `url`, which a program without stepscope's code has launched.

        Raises:
            EngineError: the adapter does not support servers.
        """
        raise EngineError(
            f"this adapter drives no servers, and {url!r} is one. Fix: a path to the engine itself"
        )

    @abstractmethod
    def owned(self) -> Sequence[object]:
        """Return the engines of this kind that live in this process, for `capture(engines="<name>")`.

        The order is the same at every call. Empty if there is no engine, or if the adapter cannot determine
        which objects are engines.
        """

    @abstractmethod
    def __call__(self, engine: object, replica: int) -> EngineProfiler:
        """Return the profiler for an engine object, with the number `replica`."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return {name: entry point} of the installed adapters. The result is cached until a name is not found,
    because reading the metadata of every package takes 10 ms of CPU if an engine is installed.
    """
    from importlib.metadata import entry_points  # slow to import

    return {point.name: point for point in entry_points(group="stepscope.engines")}


def distributions() -> list[str]:
    """Return names of packages that may contain an engine: the names of the installed adapters, and the
    `distributions` of the adapters that this process has imported.

    Other adapters are not loaded, because loading them took 9 ms of CPU beside the first capture.
    """
    names = list(installed())
    for point in installed().values():
        try:
            if point.module in sys.modules:
                names += cast(EngineFactory, point.load()).distributions
        except ours() as error:
            log.debug("stepscope: the engine adapter %s cannot be loaded: %r", point.name, error)
    return names


def load_engine(name: str) -> EngineFactory:
    """Return the adapter registered under `name`.

    Raises:
        EngineError: no such adapter is registered. The message names the registered adapters and what to
            install.
    """
    adapters = installed()
    if name not in adapters:
        installed.cache_clear()
        raise EngineError(
            f"no profiler for engine {name!r}; installed: {', '.join(sorted(adapters)) or 'none'}. "
            f"Fix: install the adapter: {INSTALL_AN_ADAPTER}"
        )
    return _loaded(adapters[name])


def _loaded(point: EntryPoint) -> EngineFactory:
    factory = point.load()
    if isinstance(factory, type):
        raise EngineError(
            f"the entry point {point.name} = {point.value!r} in stepscope.engines names a class; allowed: an "
            f"object. Fix: name an instance, as FACTORY = {factory.__name__}()"
        )
    return cast(EngineFactory, factory)


def recognise(engine: object, replica: int) -> EngineProfiler:
    """Return `engine` itself if it is an `EngineProfiler`, else the profiler of the adapter that recognises
    it.

    Args:
        engine: An object that the user gave to `capture(engines=)`.
        replica: Position of `engine` in `engines`, which becomes the replica's number unless the profiler has
            one.

    Raises:
        EngineError: no installed adapter recognises this object.
    """
    if isinstance(engine, EngineProfiler):
        if engine.replica is None:
            engine.replica = replica
        return engine
    points = sorted(installed().values(), key=lambda point: _order(point, engine))
    for point in points:
        factory = _loaded(point)
        if factory.recognises(engine):
            return factory(engine, replica)
    installed.cache_clear()
    kind = f"{type(engine).__module__}.{type(engine).__qualname__}"
    raise EngineError(
        f"no installed engine adapter knows {kind}; "
        f"installed: {', '.join(sorted(point.name for point in points)) or 'none'}. "
        f"Fix: install its adapter ({INSTALL_AN_ADAPTER}), or pass an EngineProfiler of your own"
    )


def _order(point: EntryPoint, engine: object) -> tuple[bool, bool, str]:
    """Return the sort key of an adapter. The adapter with the name of the engine's library comes first, and
    `torch` last, because `torch` accepts any object that contains a module.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(engine).__mro__}
    return point.name == "torch", point.name not in libraries, point.name
