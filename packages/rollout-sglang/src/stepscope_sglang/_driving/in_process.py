"""The target of a capture if the engine is in this process.

The engine is called through its TokenizerManager, which belongs to the event loop that used it first. A call
on another loop never gets an answer. After a call is cancelled, every later call hangs (up to 0.5.15) or gets
a wrong answer (later versions). So calls run on the TokenizerManager's loop, and a thread waits until each
call has ended.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

from stepscope.engines import pass_socket
from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._driving.target import EngineDiedError, EngineFacts, facts_of, refusal
from stepscope_sglang._engine_side.states import RPD_LIBRARY, profile_v2

_LOOK_S = 0.5
"""Interval at which stepscope checks whether an engine that does not answer is still alive."""


_MOMENT_S = 0.05
"""Time for which `run_for_a_moment` runs the event loop of a waiting caller."""
_SWITCHES = ("SGLANG_PROFILE_WITH_STACK", "SGLANG_PROFILE_RECORD_SHAPES")
_settings: WeakKeyDictionary[object, Mapping[str, object]] = WeakKeyDictionary()
"""{TokenizerManager: result of `settings_of`}. One writer: `settings_of`."""
_managers: WeakSet[object] = WeakSet()
"""The TokenizerManagers that a profiler was made for in this process. One writer: `InProcessTarget`."""


class TokenizerManager(Protocol):
    """The part of sglang's TokenizerManager that stepscope uses."""

    server_args: Any

    async def stop_profile(self) -> object: ...


class Engine(Protocol):
    """The part of `sglang.Engine` that stepscope uses."""

    @property
    def tokenizer_manager(self) -> TokenizerManager: ...


class InProcessTarget:
    """An `sglang.Engine`, or its TokenizerManager."""

    remote = False

    def __init__(self, engine: Engine | TokenizerManager) -> None:
        manager = getattr(engine, "tokenizer_manager", None)
        self.manager: TokenizerManager = cast(TokenizerManager, engine) if manager is None else manager
        self.engine: object = self.manager
        self._engine = None if manager is None else engine
        _managers.add(self.manager)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._facts: EngineFacts | None = None
        self.waited_until = 0.0
        """Monotonic time until which a synchronous caller waits for stepscope. Until then, stepscope may run
        the caller's event loop."""

    def facts(self) -> EngineFacts:
        if self._facts is None:
            start = getattr(self.manager, "start_profile", None)
            if start is None:
                raise EngineError(
                    f"{type(self.manager).__qualname__} has no start_profile "
                    f"(sglang {_versions.installed()}). "
                    "Fix: pass the Engine or its tokenizer_manager"
                )
            self._facts = facts_of(
                settings_of(self.manager),
                version=_versions.installed(),
                options=_versions.dialect_of(start).options,
                forced_off=switched_off(),
                profile_v2=profile_v2(),
                rpd=find_spec(RPD_LIBRARY) is not None,
            )
        return self._facts

    def find_loop(self, running: asyncio.AbstractEventLoop | None) -> None:
        """Find the loop that owns the TokenizerManager.

        Args:
            running: The loop of the code that starts a capture, or None for synchronous code. This loop will
                own the TokenizerManager if the TokenizerManager was never used.

        Raises:
            EngineError: no loop is known.
        """
        owner = getattr(self.manager, "event_loop", None)
        own = getattr(self._engine, "loop", None)
        if owner is None and own is not None and (own.is_running() or running is None):
            owner = own
        self._loop = owner if owner is not None else running
        if self._loop is None:
            raise EngineError(
                "nothing says on which event loop this TokenizerManager will be used. Fix: generate once "
                "before the first capture, or `async with capture(...)` on the loop that generates"
            )

    def start(self, request: Mapping[str, object]) -> None:
        manager: Any = self.manager
        if _versions.dialect_of(manager.start_profile).as_object:
            self._call(lambda: manager.start_profile(_versions.profile_request()(**request)))
        else:
            self._call(lambda: manager.start_profile(**request))

    def stop(self) -> None:
        self._call(self.manager.stop_profile)

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        ask = getattr(self.manager, "get_internal_state", None)
        answer = None if ask is None else self._call(ask, patience_s)
        return answer if isinstance(answer, list) else ()

    def pids(self) -> list[int]:
        """Return the process ids of the engine; empty if they cannot be distinguished from those of another
        engine.
        """
        tell = getattr(self._engine, "get_all_child_pids", None)  # absent before 0.5.12
        if tell is not None:
            return pass_socket.below(tell())
        return pass_socket.below([os.getpid()]) if is_only_engine() else []

    def when_it_runs(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as the TokenizerManager's loop runs.

        Synchronous code runs the loop only while it generates, and its call fails if stepscope already runs
        the loop.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if loop.is_running():
            then()
        else:
            loop.call_soon_threadsafe(then)

    @property
    def reachable(self) -> bool:
        return self._loop is not None and self._loop.is_running()

    def _call(self, ask: Callable[[], Coroutine[Any, Any, object]], patience_s: float = math.inf) -> object:
        loop = self._loop
        if loop is None or loop.is_closed():
            raise EngineError(
                "the event loop of this engine is closed: the engine cannot be reached any more"
            )
        try:
            if patience_s < math.inf and time.monotonic() > self.waited_until and not loop.is_running():
                raise EngineError("the event loop of this engine does not run now")
            return self._wait(loop, asyncio.run_coroutine_threadsafe(ask(), loop), patience_s)
        except CancelledError as error:
            raise EngineError("the event loop of this engine ended while the engine was asked") from error
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise refusal(str(error), str(error)) from error

    def _wait(self, loop: asyncio.AbstractEventLoop, answer: Future[object], patience_s: float) -> object:
        tell = getattr(self._engine, "get_all_child_pids", None)  # absent before 0.5.12
        schedulers = [] if tell is None else list(tell())
        until = time.monotonic() + patience_s
        while not answer.done():
            if time.monotonic() > until:  # the call is not cancelled, and its late answer is dropped
                raise EngineError("the engine does not answer now")
            if time.monotonic() > self.waited_until or not run_for_a_moment(loop, answer):
                wait([answer], _LOOK_S)
            dead = [pid for pid in schedulers if not _lives(pid)]
            if loop.is_closed() and not answer.done():
                raise EngineError("the event loop of this engine was closed while the engine was asked")
            if dead and not answer.done():
                raise EngineDiedError(f"the engine has died (process {dead[0]} is gone)")
        return answer.result()


def is_only_engine() -> bool:
    """Return whether a profiler was made for exactly one engine of this process."""
    return len(_managers) == 1


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return not Path("/proc").is_dir()
    return state not in ("Z", "X")


def settings_of(manager: Any) -> Mapping[str, object]:
    """Return the resolved arguments of a TokenizerManager.

    Newer versions keep the resolved arguments apart from the given arguments. Resolving 500 arguments takes
    5 ms of CPU, so the result is cached. The arguments that a capture needs never change.
    """
    known = _settings.get(manager)
    if known is None:
        resolved = getattr(manager.server_args, "resolved_dict", None)
        known = _settings[manager] = vars(manager.server_args) if resolved is None else resolved()
    return known


def switched_off() -> frozenset[str]:
    """Return the variables in this process' environment that switch an option of the profiler off."""
    off = ("0", "false", "no", "n")
    return frozenset(name for name in _SWITCHES if os.environ.get(name, "").lower() in off)


def run_for_a_moment(loop: asyncio.AbstractEventLoop, answer: Future[object]) -> bool:
    """Run the loop for a moment, or until the answer is there. Return False if the loop is already running or
    is closed.

    The loop runs only for a moment, because its owner needs the loop as soon as the wait ends.
    """
    if loop.is_running():
        return False
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def end_soon(_: Future[object]) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(end)

    answer.add_done_callback(end_soon)
    try:
        loop.call_soon_threadsafe(loop.call_later, _MOMENT_S, end)
        loop.run_until_complete(over)
    except RuntimeError:  # another thread began to run the loop, or closed the loop
        return False
    return True
