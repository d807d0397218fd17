"""Calls into a Ray actor whose class does not use stepscope. Shared by `RayRollout` and the Ray fleet.

`handle.__ray_call__` runs a function in the actor's process. In Ray 2.60, the function runs:

sync actor      on its main thread, after the running method and the calls that were queued before
threaded actor  on a thread of its pool, in no fixed order
async actor     on a thread of Ray, never on the actor's loop, once the loop has decoded the arguments. No
                other call of the actor begins until the function returns, so the function must not wait

In an async actor the function therefore hands its work over to the actor's loop, and the caller polls until
the work is done. Exceptions are sent as text, because the caller may be unable to unpickle them.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from stepscope.engines.own_thread import own_thread
from stepscope.errors import EngineError, StepscopeError, ours
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact
from stepscope.files.storage import PIECE, Arrival

if TYPE_CHECKING:
    from ray.actor import ActorHandle


T = TypeVar("T")
Reply: TypeAlias = tuple[Literal["done", "failed", "pending"], object]

_HOLD_S = 1.0
"""Longest time that a call waits in a sync actor for a coroutine to finish. The caller then polls."""


class ActorGoneError(EngineError):
    """The actor has died, or cannot be reached now because it may be restarting."""

    died = False
    """True if Ray reports that the actor died."""


class CallFailedError(EngineError):
    """A function of stepscope raised in the actor, or could not run there."""


class Stamps(NamedTuple):
    """Times of one request and its answer on the wall clocks of both sides, in unix ns."""

    sent_ns: int
    heard_ns: int
    answered_ns: int
    received_ns: int


class ActorLine:
    """A connection to one actor. Every answer has timestamps, which are used to compare the two clocks."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor
        self.stamps: deque[Stamps] = deque(maxlen=64)

    async def call(self, fn: Callable[..., object], *args: object, keep: bool = False) -> Any:
        """Run `fn(instance, *args)` in the actor and return its result.

        Args:
            fn: A plain function runs on the thread that runs the actor's methods; in an async actor, on a
                thread of its own. A coroutine function runs on the actor's loop, or on a loop of stepscope if
                the actor has none.
            args: Arguments of `fn`. They are pickled, like the result.
            keep: True to let the function go on in the actor if this call is cancelled; False to cancel it.

        Raises:
            ActorGoneError: the actor has died or cannot be reached.
            CallFailedError: the function failed in the actor. The message has the error's text.
        """
        ticket = uuid.uuid4().hex
        pause_s = 0.001
        try:
            state, value = await self.ask(begin, ticket, fn, args)
            while state == "pending":
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
                state, value = await self.ask(poll, ticket)
        except asyncio.CancelledError:
            self.tell(abandon, ticket, not keep)
            raise
        if state == "failed":
            raise CallFailedError(str(value))
        return value

    async def ask(self, fn: Callable[..., T], *args: object) -> T:
        """Run a short plain function in the actor, on a thread that Ray chooses. Raises as `call` does."""
        import ray

        if not ray.is_initialized():  # else Ray would start an empty cluster and search for the actor there
            raise ActorGoneError("Ray was shut down here, and the actor cannot be reached without it")
        sent = time.time_ns()
        try:
            answer = self.actor.__ray_call__.remote(stamped, fn, args)
        except ours() as error:
            message = str(error).partition("\n")[0][:300]
            raise CallFailedError(f"the call cannot be sent: {type(error).__name__}: {message}") from error
        try:
            heard, answered, value = await answer
        except ray.exceptions.RayActorError as error:
            gone = ActorGoneError(_cause(error))
            gone.died = not _is_unavailable(error)
            raise gone from None
        except ray.exceptions.RayError as error:
            raise CallFailedError(_last_line(error)) from None
        self.stamps.append(Stamps(sent, heard, answered, time.time_ns()))
        return cast(T, value)

    def tell(self, fn: Callable[..., object], *args: object) -> None:
        """Make the actor run `fn(instance, *args)` as `call` does, without waiting. The outcome is not
        reported.
        """
        import ray

        if not ray.is_initialized():
            return
        try:
            self.actor.__ray_call__.remote(launch, fn, args)
        except ours():  # the actor is gone or its queue is full; no caller waits for the outcome
            pass


# The code below runs in the actor's process, on a thread that Ray chooses.

_jobs: dict[str, Future[object]] = {}
"""{ticket: running work}. `begin` adds entries. `poll` removes finished work, and `abandon` removes
unfinished work."""
_abandoned: deque[tuple[str, bool]] = deque(maxlen=1000)
"""(ticket, cancel) of calls that were abandoned before they began, because threaded and async actors begin
calls in any order."""
_lock = threading.RLock()
_own_loop: asyncio.AbstractEventLoop | None = None
"""Event loop for coroutines in actors that have no loop; None before the first coroutine. One writer:
`_private_loop`."""


def stamped(instance: object, fn: Callable[..., T], args: tuple[object, ...]) -> tuple[int, int, T]:
    """Run `fn(instance, *args)` and return (time of arrival, time of the answer, result), in unix ns."""
    heard = time.time_ns()
    result = fn(instance, *args)
    return heard, time.time_ns(), result


def present(instance: object) -> None:
    """Do nothing. The answer shows that the actor is alive and not busy, and the answer's timestamps compare
    the clocks of both hosts. Used before a call that must not run late.
    """


def begin(instance: object, ticket: str, fn: Callable[..., object], args: tuple[object, ...]) -> Reply:
    loop = _actors_loop()
    with _lock:
        if (ticket, True) in _abandoned:
            return "failed", "the caller gave up before its call began"
        job = None if _runs_here(loop, fn) else _submit(loop, fn, instance, args)
        if job is not None and (ticket, False) not in _abandoned:
            _jobs[ticket] = job
    if job is None:
        return _attempt(fn, instance, *args)
    if loop is None:
        wait([job], timeout=_HOLD_S)
    return poll(instance, ticket)


def poll(instance: object, ticket: str) -> Reply:
    job = _jobs.get(ticket)
    if job is None:
        return "failed", "the actor restarted during the call"
    if not job.done():
        return "pending", None
    _jobs.pop(ticket, None)
    return _attempt(job.result)


def launch(instance: object, fn: Callable[..., object], args: tuple[object, ...]) -> None:
    loop = _actors_loop()
    if _runs_here(loop, fn):
        _attempt(fn, instance, *args)  # Ray would print an exception in the caller's process as unhandled
    else:
        _submit(loop, fn, instance, args)


def abandon(instance: object, ticket: str, cancel: bool) -> None:
    """Forget a ticket. With `cancel`, also cancel its call, whether it is running or has not begun."""
    with _lock:
        job = _jobs.pop(ticket, None)
        if job is None:
            _abandoned.append((ticket, cancel))
    if cancel and job is not None:
        job.cancel()


def _runs_here(loop: asyncio.AbstractEventLoop | None, fn: Callable[..., object]) -> bool:
    return fn is abandon or (loop is None and not inspect.iscoroutinefunction(fn))


def _submit(
    loop: asyncio.AbstractEventLoop | None, fn: Callable[..., Any], instance: object, args: tuple[object, ...]
) -> Future[object]:
    coroutine = inspect.iscoroutinefunction(fn)
    work = fn(instance, *args) if coroutine else own_thread(fn, instance, *args)
    return asyncio.run_coroutine_threadsafe(work, loop or _private_loop())


def _attempt(fn: Callable[..., object], *args: object) -> Reply:
    try:
        return "done", fn(*args)
    except CancelledError:
        return "failed", "the call was cancelled in the actor"
    except ours() as error:
        is_own = isinstance(error, StepscopeError)
        return "failed", str(error) if is_own else f"{type(error).__name__}: {error}"


def _actors_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs this actor's coroutine methods; None for sync and threaded actors."""
    from ray._private.worker import global_worker

    # Ray has no public way to get this loop outside of a coroutine method. "__init__" names the default
    # loop; the loop of a concurrency group runs only that group's methods.
    worker = cast(Any, global_worker).core_worker
    if not worker.current_actor_is_asyncio():
        return None
    loop, _thread = worker.get_event_loop(SimpleNamespace(function_name="__init__"), None)
    return cast(asyncio.AbstractEventLoop, loop)


def _private_loop() -> asyncio.AbstractEventLoop:
    global _own_loop
    with _lock:
        if _own_loop is None:
            _own_loop = asyncio.new_event_loop()
            threading.Thread(target=_own_loop.run_forever, name="stepscope-engine-loop", daemon=True).start()
        return _own_loop


# The code below runs in the caller's process.


def _cause(error: BaseException) -> str:
    """Return the reason why an actor is unreachable, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor is dead because")]
    state = "unavailable (restarting?)" if _is_unavailable(error) else "died"
    return f"actor {state}: {(*reasons, *lines, '')[0][:300]}"


def _is_unavailable(error: BaseException) -> bool:
    return type(error).__name__ == "ActorUnavailableError"


def _last_line(error: BaseException) -> str:
    """Return the error at the end of a remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1][:300] if lines else type(error).__name__
    if "No module named 'stepscope" in text:
        return f"{text}. Fix: install stepscope in the actor's environment, in the same version as here"
    return text


LEFT_BEHIND = "artifacts on "
"""Prefix of the key in `ignored` for files that were not copied from their host. The host's name follows."""


async def bring_home(line: ActorLine, step_dir: str, artifacts: Sequence[Artifact]) -> dict[str, str]:
    """Copy the actor's files that this host does not have, with their sidecars, to the same paths.

    Returns:
        `{"artifacts on <host>": reason}` for files that could not be copied; empty if none is missing.
    """
    left: dict[str, str] = {}
    for artifact in artifacts:
        path = Path(step_dir, artifact.path)
        if await own_thread(path.exists):
            continue
        try:
            for name in await line.call(names_of, str(path)):
                if not Path(name).is_relative_to(step_dir) or ".." in Path(name).parts:
                    raise EngineError(f"{name} lies outside of the step's folder")
                await arrive(Path(name), partial(line.call, read_piece, name))
        except (EngineError, OSError) as error:
            left[f"{LEFT_BEHIND}{artifact.host}"] = f"{path} is there and not here: {error}"
    return left


async def arrive(path: Path, read: Callable[[int], Awaitable[bytes]]) -> None:
    """Receive a file in pieces. It gets the name `path` once it is complete.

    Args:
        read: Returns the piece of the file at an offset; empty at the file's end.
    """
    arrival = await own_thread(Arrival, path)
    try:
        while piece := await read(arrival.bytes):
            await own_thread(arrival.add, piece)
        await own_thread(arrival.finish)
    except BaseException:
        await own_thread(arrival.give_up)
        raise


# The code below runs in the actor's process.


def names_of(instance: object, path: str) -> list[str]:
    """Return `path`, or the paths of all files in the folder `path`, followed by the path of the sidecar. The
    sidecar marks the file or folder as complete.
    """
    files = [file for file in Path(path).rglob("*") if file.is_file()] if os.path.isdir(path) else [path]
    return [str(name) for name in (*files, sidecar_of(Path(path)))]


def read_piece(instance: object, path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)
