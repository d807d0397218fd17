"""RayRollout: the profiler of an inference replica that lives in a Ray actor of an unchanged class."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from stepscope.engines import local_engines
from stepscope.engines.actor_call import ActorLine, CallFailedError, bring_home, present
from stepscope.engines.local_engines import adapters, registered, replica_of
from stepscope.engines.own_thread import own_thread
from stepscope.engines.protocol import (
    EngineCapture,
    EngineProfiler,
    EngineProfilerBase,
    close_window,
    load_engine,
    open_window,
    waited_s,
)
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ProfilerFactory: TypeAlias = Callable[[object, int], EngineProfiler]
"""Returns the profiler for (engine, replica). Called in the actor; an `EngineFactory` is one."""
Instrumented: TypeAlias = dict[str, list[tuple[int | None, object | None]]]
"""{adapter: [(the framework's number or None, where)]} for the engines that a process has registered. `where`
is None for an engine in the process, else the engine's URL or Ray actor."""

_CHECK_S = 300.0
"""Longest wait in seconds for a check, long enough for an actor that is still loading its model."""
_GRACE_S = 2.0
"""Longest time in seconds that a start waits for an earlier stop to finish."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Address of an engine in an actor."""

    engine: str | ProfilerFactory
    attribute: str | None
    replica: int


class RayRollout(EngineProfilerBase):
    """Drives the engine inside a Ray actor. The engine's profiler is built and run in the actor.

    Works with sync, threaded and async actors; an async actor's engine is driven on the actor's own loop. A
    busy sync actor answers when its current method has returned. If the caller cancels a start, the actor
    undoes the start as soon as possible.
    """

    def __init__(
        self,
        actor: ActorHandle[Any],
        engine: str | ProfilerFactory = "torch",
        attribute: str | None = None,
        replica: int | None = None,
    ) -> None:
        """
        Args:
            actor: Handle of the replica's actor.
            engine: The adapter's name (`torch`, `vllm`, `sglang`), or (engine, replica) -> profiler.
            attribute: Path of the engine in the actor's object: `llm` for `self.llm`, `server.engine`... If
                None, stepscope uses the first of these that exists: (1) the engine that an `instrument` entry
                found in the actor, (2) the actor's object itself, if the adapter recognises it or `engine` is
                a function, (3) the only attribute that the adapter recognises, (4) the only engine of the
                adapter's kind in the process.
            replica: The replica's number; None for its position in `capture(engines=[...])`.
        """
        super().__init__(replica)
        self._actor = actor
        self._line = ActorLine(actor)
        self._engine = engine
        self._attribute = attribute
        self._place = self._at(0)
        self._token: str | None = None
        """Token of the running capture in the actor, or None when idle."""
        self._step_dir = ""
        self._given_up: list[str] = []
        """Tokens of starts that were cancelled before the actor answered. The actor may still run them."""

    @property
    def actor_id(self) -> str:
        """Id of the replica's actor, as Ray shows it."""
        return str(self._actor._actor_id.hex())

    async def instrumented(self) -> Instrumented:
        """Return the engines that `instrument` entries have found in the actor."""
        return await self._line.ask(instrumented_here)

    @property
    def world_size(self) -> int | None:
        return None

    @property
    def workers(self) -> Sequence[object]:
        return (self._actor,)

    def check(self) -> None:
        """Build the profiler in the actor and run its check there. Blocks for up to 300 s.

        Raises:
            EngineError: the check failed. The message has the fix.
        """
        self._check(check, self._at(self.replica or 0))

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        ignored: Mapping[str, str] = self._check(check_capture, self._at(self.replica or 0), capture)
        return ignored

    def _check(self, question: Callable[..., object], *arguments: object) -> Any:
        call = self._line.call(question, *arguments)
        try:
            return asyncio.run(asyncio.wait_for(call, _CHECK_S))
        except asyncio.TimeoutError:
            raise EngineError(
                f"the actor did not answer within {_CHECK_S:g} s. Fix: check before it is given long work"
            ) from None

    def sample_apart(self) -> None:
        self._line.tell(seat, self._at(self.replica or 0))

    async def open(self, capture: EngineCapture) -> None:
        await self.start(capture)  # `open_window` in the actor waits for requests

    async def start(self, capture: EngineCapture) -> None:
        if self._token is not None:
            raise EngineError("a capture is running on this replica. Fix: stop() it first")
        self._place, self._token = self._at(capture.replica), uuid.uuid4().hex
        self._step_dir = capture.step_dir
        try:
            # If the caller gives up during this call because the actor is busy, there is no start to undo.
            await self._line.ask(present)
            await self._start(self._token, capture)
        except BaseException:
            self._token = None
            raise

    async def stop(self) -> list[Artifact]:
        token, self._token = self._token, None
        if token is None:
            return []
        step_dir = self._step_dir  # a later start may change `_step_dir` before this stop has ended
        # The actor completes the stop even if the caller gives up, because the files are worth having.
        try:
            call = self._line.call(stop, self._place, token, waited_s.get(), keep=True)
            artifacts, ignored = await call
        except CallFailedError:
            with suppress(EngineError):  # `ignored` may state that files still come; the actor may be gone
                self._ignored = await self._line.ask(ignored_of, self._place)
            raise
        self._ignored = ignored | await bring_home(self._line, step_dir, artifacts)
        return list(artifacts)

    async def _start(self, token: str, capture: EngineCapture) -> None:
        try:
            call = self._line.call(start, self._place, token, capture, self._given_up)
            self._ignored = await call
            self._given_up = []
        except asyncio.CancelledError:
            self._given_up.append(token)
            self._line.tell(take_back, self._place, self._given_up)
            raise

    def _at(self, replica: int) -> Place:
        return Place(engine=self._engine, attribute=self._attribute, replica=replica)


# The code below runs in the actor, on its event loop or, if it has none, on a loop of stepscope.


@dataclass
class Seat:
    """One engine of this process, with its profiler and its capture."""

    engine: object
    profiler: EngineProfiler
    token: str | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: asyncio.Future[list[Artifact]] | None = None
    """The latest stop, or None. The stop may still be running although its caller no longer waits."""

    def end(self) -> asyncio.Future[list[Artifact]]:
        self.token = None
        local_engines.end(self.profiler)
        self.stopping = asyncio.ensure_future(close_window(self.profiler))
        self.stopping.add_done_callback(_seen)
        return self.stopping

    async def await_stop(self) -> None:
        """Wait for the end of the latest stop. A stop that takes too long is cancelled."""
        if self.stopping is None:
            return
        await asyncio.wait([self.stopping], timeout=_GRACE_S)
        if not self.stopping.done():
            self.stopping.cancel()
            await asyncio.wait([self.stopping])


_seats: dict[tuple[object, ...], Seat] = {}
"""The seats of this process. They are not stored in the actor's object, which belongs to the user. One
writer: `_seat`."""
_taken_back: deque[str] = deque(maxlen=1000)
"""The latest tokens of starts whose caller no longer waits. One writer: `take_back`, which runs on the same
loop as `start`. So `start` sees each token, whichever of the two calls arrives first."""


def instrumented_here(instance: object) -> Instrumented:
    engines: Instrumented = {adapter: [] for adapter in adapters()}
    for adapter, engine, replica in registered():
        engines[adapter].append((replica, engine if is_elsewhere(engine) else None))
    return engines


def is_elsewhere(engine: object) -> bool:
    """Return whether an engine is the URL of a server or a Ray actor, and so not in this process."""
    actor = sys.modules.get("ray.actor")
    return isinstance(engine, str) or (actor is not None and isinstance(engine, actor.ActorHandle))


async def check(instance: object, place: Place) -> None:
    taken = await _seat(instance, place)
    await own_thread(taken.profiler.check)


async def check_capture(instance: object, place: Place, capture: EngineCapture) -> dict[str, str]:
    taken = await _seat(instance, place)
    return dict(await own_thread(taken.profiler.check_capture, capture))


async def seat(instance: object, place: Place) -> None:
    """Make the profiler of an engine, so that the flight recorder of this process samples the engine's
    counters.
    """
    await _seat(instance, place)


async def start(
    instance: object, place: Place, token: str, capture: EngineCapture, given_up: list[str]
) -> dict[str, str]:
    await take_back(instance, place, given_up)
    seat = await _seat(instance, place)
    async with seat.starting:
        await seat.await_stop()
        if token not in _taken_back:
            local_engines.begin(seat.profiler)
            await open_window(seat.profiler, capture)
            seat.token = token
    if token in _taken_back:
        await take_back(instance, place, [token])
        raise EngineError("the caller gave up before the capture had begun")
    return dict(seat.profiler.ignored)


async def stop(
    instance: object, place: Place, token: str, waited: float | None
) -> tuple[list[Artifact], dict[str, str]]:
    seat = _seats.get(_key(place))
    if seat is None or seat.token != token:
        raise EngineError("the actor restarted after the capture began: what it had recorded is lost")
    waited_s.set(waited)  # sets the limit of this asyncio task only
    return await seat.end(), dict(seat.profiler.ignored)


def ignored_of(instance: object, place: Place) -> dict[str, str]:
    seat = _seats.get(_key(place))
    return {} if seat is None else dict(seat.profiler.ignored)


async def take_back(instance: object, place: Place, tokens: list[str]) -> None:
    """End the captures whose start was cancelled by the caller, even if the start has not arrived yet."""
    _taken_back.extend(tokens)
    seat = _seats.get(_key(place))
    if seat is not None and seat.token in tokens:
        seat.end()


def _seen(stopping: asyncio.Future[list[Artifact]]) -> None:
    if not stopping.cancelled():
        stopping.exception()  # else asyncio logs "exception was never retrieved"


async def _seat(instance: object, place: Place) -> Seat:
    factory = place.engine
    if isinstance(factory, str):
        factory = await own_thread(load_engine, factory)  # imports the adapter
    engine = _engine_at(instance, place, factory)
    seat = _seats.get(_key(place))
    if seat is None or (seat.engine is not engine and seat.token is None):
        earlier = None if seat is None else seat.profiler
        seat = _seats[_key(place)] = Seat(engine, factory(engine, place.replica))
        local_engines.seat(seat.profiler, instead_of=earlier)
    return seat


def _key(place: Place) -> tuple[object, ...]:
    name = place.engine if isinstance(place.engine, str) else getattr(place.engine, "__qualname__", "")
    return name, place.attribute, place.replica


def _engine_at(instance: object, place: Place, factory: ProfilerFactory) -> object:
    if place.attribute is None and isinstance(place.engine, str):
        engine = replica_of(place.engine, place.replica)
        if engine is not None:
            return engine
    return _find(instance, place.attribute, factory)


def _find(instance: object, attribute: str | None, factory: ProfilerFactory) -> object:
    if attribute is not None:
        return _follow(instance, attribute)
    recognises = getattr(factory, "recognises", None)
    if recognises is None or recognises(instance):
        return instance
    known = [name for name, value in _attributes(instance).items() if recognises(value)]
    if len(known) == 1:
        return getattr(instance, known[0])
    owned = [] if known else list(getattr(factory, "owned", list)())
    if len(owned) == 1:
        return owned[0]
    finding = f"{len(known)} attributes ({', '.join(known)})" if known else "no attribute"
    if owned:
        finding += f" (and its process {len(owned)} engines)"
    raise EngineError(
        f"{type(instance).__name__} has {finding} that the adapter recognises. "
        "Fix: RayRollout(actor, attribute='...')"
    )


def _follow(instance: object, attribute: str) -> object:
    try:
        return reduce(getattr, attribute.split("."), instance)
    except AttributeError as error:
        raise EngineError(
            f"{type(instance).__name__} has no {attribute!r} ({error}); its attributes: "
            f"{', '.join(sorted(_attributes(instance))) or 'none'}. Fix: RayRollout(actor, attribute='...')"
        ) from None


def _attributes(instance: object) -> dict[str, object]:
    return getattr(instance, "__dict__", {})
