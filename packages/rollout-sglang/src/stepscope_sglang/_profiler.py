"""Parts that SglangProfiler and SglangServer share, and the profiler of engines in this process."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

from stepscope import ProfileConfig
from stepscope.engines import (
    EngineCapture,
    EngineFactory,
    EngineProfiler,
    EngineProfilerBase,
    patience_s,
    refuse_second_start,
)
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope_sglang import _versions
from stepscope_sglang._capture.options import expect_first_profiler
from stepscope_sglang._capture.session import Line, Session
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._driving.in_process import Engine, InProcess, TokenizerManager, of_ours
from stepscope_sglang._driving.work_thread import WorkThread

T = TypeVar("T")
log = logging.getLogger("stepscope")
_warned: set[str] = set()


class Replica(EngineProfilerBase, ABC):
    """One replica behind one or more lines: everything but how it is reached."""

    def __init__(self, replica: int | None) -> None:
        super().__init__(replica)
        self._sessions: list[Session] = []
        self._capture: EngineCapture | None = None
        self._thread = WorkThread("stepscope-sglang")
        self._watchdog: threading.Timer | None = None

    async def start(self, capture: EngineCapture) -> None:
        refuse_second_start(self._capture)
        self._capture = capture
        try:
            self._prepare()
            with self._waited_for(capture):
                sessions = await self._do(lambda: self._open(capture))
        except asyncio.CancelledError:
            self._capture = None
            self._thread.submit(self._drop)
            raise
        except BaseException:
            self._capture = None
            raise
        self._sessions = sessions

    async def stop(self) -> list[Artifact]:
        capture, self._capture = self._capture, None
        if capture is None:
            return []
        # A caller that gives up leaves the files to be finished behind its back.
        with self._waited_for(capture):
            return await self._do(self._close)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(work)))

    # To be said by the kinds of replicas.

    @abstractmethod
    def _lines(self) -> Sequence[tuple[Line, str | None]]:
        """Return the way to each of its engines, with a label if there are several."""

    def _waited_for(self, capture: EngineCapture) -> AbstractContextManager[None]:
        """While the caller waits for what is done on the thread."""
        return nullcontext()

    def _prepare(self) -> None:  # only some kinds have to
        """On the event loop of the caller, before anything else."""

    def _later(self, work: Callable[[], None]) -> None:
        """Do `work` on the thread, once the engine can be reached."""
        self._thread.submit(work)

    # On the thread.

    def _open(self, capture: EngineCapture) -> list[Session]:
        self._sessions = []
        try:
            for line, label in self._lines():
                session = Session(line, capture, label)
                session.open()
                self._sessions.append(session)
        except BaseException:
            self._drop()
            raise
        self._ignored = _joined(self._sessions)
        self._watch(capture)
        return self._sessions

    def _close(self) -> list[Artifact]:
        self._unwatch()
        sessions, self._sessions = self._sessions, []
        found: list[Artifact] = []
        troubles: list[Exception] = []
        for session in sessions:
            try:
                found += session.close()
            except Exception as error:
                troubles.append(error)
        self._ignored = _joined(sessions)
        if troubles and not found:
            raise troubles[0] if isinstance(troubles[0], EngineError) else EngineError(str(troubles[0]))
        if troubles:
            self._ignored["files"] = "; ".join(map(str, troubles))
        return found

    def _drop(self) -> None:
        self._unwatch()
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            try:
                session.drop()
            except Exception as error:
                log.warning("stepscope: a capture of SGLang that was given up could not be ended: %s", error)

    def _watch(self, capture: EngineCapture) -> None:
        if capture.seconds is None:
            return
        sessions, reason = self._sessions, f"open for more than {capture.seconds:g} s"
        self._watchdog = threading.Timer(capture.seconds, lambda: self._expire(sessions, reason))
        self._watchdog.daemon = True
        self._watchdog.start()

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _expire(self, sessions: list[Session], reason: str) -> None:
        def work() -> None:
            for session in sessions if sessions is self._sessions else ():
                session.expire(reason)

        self._later(work)


class SglangProfiler(Replica):
    """Drives the profiler of an `sglang.Engine` in this process, or of its TokenizerManager, as RL frameworks
    hold it. The schedulers record themselves; nothing of them runs here.
    """

    def __init__(self, engine: Engine | TokenizerManager, *, replica: int | None = None) -> None:
        """
        Args:
            engine: An `sglang.Engine`, a `TokenizerManager`, or what holds one as `tokenizer_manager`.
            replica: The replica's number; None for its position in `capture(engines=[...])`.
        """
        super().__init__(replica)
        self._line = InProcess(engine)

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError when the object is no engine of a known kind."""
        return self._line.facts()

    @property
    def world_size(self) -> int:
        return self.facts.world_size

    def check(self) -> None:
        check_facts(self.facts)

    @contextmanager
    def _waited_for(self, capture: EngineCapture) -> Iterator[None]:
        seconds = patience_s(capture)
        until = time.monotonic() + max(seconds - 1, seconds / 2)
        self._line.waited_until = until
        try:
            yield
        finally:
            if self._line.waited_until == until:  # not a later caller's
                self._line.waited_until = 0.0

    def _lines(self) -> Sequence[tuple[Line, str | None]]:
        return [(self._line, None)]

    def _prepare(self) -> None:  # only some kinds have to
        ours = of_ours(threading.current_thread())
        self._line.find_loop(None if ours else asyncio.get_running_loop())

    def _later(self, work: Callable[[], None]) -> None:
        def when_reachable() -> None:
            if self._line.reachable:
                work()
            else:
                self._later(work)

        def submit() -> None:
            self._thread.submit(when_reachable)

        self._line.when_it_runs(submit)


class SglangFactory(EngineFactory):
    """The adapter `sglang`: knows engines and TokenizerManagers by the names of their classes."""

    distributions = ("sglang",)

    def recognises(self, engine: object) -> bool:
        return _is(engine, "Engine", "sglang.srt.entrypoints.") or _is_manager(engine)

    def owned(self) -> Sequence[object]:
        """Return the engines of this process; where there are none, TokenizerManagers (of a server in it)."""
        if "sglang.srt.managers.tokenizer_manager" not in sys.modules:
            return ()
        alive = [each for each in gc.get_objects() if self.recognises(each)]
        engines = [each for each in alive if not _is_manager(each)]
        return sorted(engines or alive, key=_order)

    def serving(self, url: str, config: ProfileConfig) -> EngineProfiler:
        from stepscope_sglang._server import SglangServer  # import time: for servers alone

        return SglangServer(url)

    def __call__(self, engine: object, replica: int) -> SglangProfiler:
        return SglangProfiler(cast(Engine, engine), replica=replica)


factory = SglangFactory()


def check_facts(facts: EngineFacts) -> None:
    """Raise EngineError for an engine that cannot be recorded at all; warn of one that may die."""
    _versions.check(facts.version)
    expect_first_profiler(facts, ())
    if facts.device == "npu":
        raise EngineError(
            "on npu SGLang writes the folders of the Ascend profiler, which this adapter does not read. "
            "Fix: record those processes with the tool npu"
        )
    since = _versions.DP_ATTENTION_SINCE
    if facts.dp_attention and _versions.older(facts.version, since):
        raise EngineError(
            f"with attention data-parallel sglang {facts.version} never answers a start. "
            f"Fix: sglang {since} or later"
        )
    first, last = _versions.MANY_CAPTURES
    version = facts.version
    if version is not None and _versions.number(first) <= _versions.number(version) <= _versions.number(last):
        _warn(
            f"sglang {version} may crash after a few captures (0.5.14 at the fifth, 0.5.16 before the "
            "fourteenth). Fix: sglang 0.5.18 or later"
        )
    if not facts.sleep_on_idle:
        _warn(
            "the idle schedulers of this SGLang engine spin, and every turn is recorded (43000 events a "
            "second). Fix: start the engine with sleep_on_idle=True (--sleep-on-idle)"
        )


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("stepscope: %s", text)


def _joined(sessions: Sequence[Session]) -> dict[str, str]:
    return {option: why for session in sessions for option, why in session.ignored.items()}


def _is_manager(engine: object) -> bool:
    return _is(engine, "TokenizerManager", "sglang.srt.managers.")


def _is(engine: object, name: str, module: str) -> bool:
    # By name: to find out must not import sglang. `type`, not `__class__`: a proxy's may do anything.
    return any(kind.__name__ == name and kind.__module__.startswith(module) for kind in type(engine).__mro__)


def _order(engine: object) -> tuple[int, int]:
    """Return a key by GPU and port, the same at every call."""
    args: Any = getattr(getattr(engine, "tokenizer_manager", engine), "server_args", None)
    return getattr(args, "base_gpu_id", None) or 0, getattr(args, "port", None) or 0
