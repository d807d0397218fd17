"""Engines in this process: which objects are ones, what they say of themselves, and how they are called.

vLLM is never imported here: an engine can only be there when its user has imported it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_vllm import _versions
from stepscope_vllm._arming import arguments
from stepscope_vllm._driving import ascend_profiler, facts, work_loop
from stepscope_vllm._engine_side import extension
from stepscope_vllm._files import traces
from stepscope_vllm._files.ranks import Layout
from stepscope_vllm._versions import Dialect

_KINDS = {"AsyncLLM", "LLM"}
_FRONTEND_S = 60.0
"""For the trace of an AsyncLLM itself; a loop that has ended would never do it."""
_LIFE_S = 0.5
"""Interval at which an engine that does not answer is checked for life."""

_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""Engine -> when it was first seen, for an order that stays. One writer: `owned`."""


def is_engine(value: object) -> bool:
    """Return whether it is an `AsyncLLM` or an `LLM` (or of a class derived from one)."""
    return any(
        kind.__name__ in _KINDS and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(value).__mro__
    )


def owned() -> list[object]:
    """Return the engines that live in this process, in the order in which they were first seen."""
    kinds = _kinds()
    for value in _instances(kinds) if kinds else ():
        _numbers.setdefault(value, len(_numbers))
    return sorted(_numbers, key=_numbers.__getitem__)


def _kinds() -> set[type]:
    """Return the engine classes that are imported, with those derived from them."""
    homes = (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm.entrypoints.llm", "LLM"))
    found = [getattr(sys.modules.get(module), name, None) for module, name in homes]
    kinds = [kind for kind in found if isinstance(kind, type)]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return set(kinds)


def _instances(kinds: set[type]) -> list[object]:
    found = [value for value in gc.get_objects() if type(value) in kinds]
    if not found and gc.get_freeze_count():
        # An LLM whose core is in this process freezes the heap (`gc.freeze`) while it is built, and what is
        # frozen is in no list. Thawing would freeze the user's objects with it again: they are not touched.
        found = [value for value in _reachable() if type(value) in kinds]
    return found


def _reachable() -> list[object]:
    """Return the objects that running code can name: variables of all frames and of the script, and their
    attributes.
    """
    frames = [frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top)]
    names = [frame.f_locals for frame in frames] + [vars(sys.modules["__main__"])]
    level = [value for each in names for value in list(each.values())]
    found = list(level)
    for _ in range(2):
        level = [value for each in level for value in _held(each)]
        found += level
    return found


def _held(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())


class Started(NamedTuple):
    """Facts about a recording that has begun."""

    folder: Path
    """Folder in which its files appear."""
    named: bool
    """Their names begin with the capture's."""
    aimed: bool
    """They are written to the capture's folder, by `extension.aim`."""
    by_others: bool = False
    """A tool above the engine (nsys) writes the recording, and nobody here."""


class Driver:
    """Calls one engine of this process. All methods run on the line, one start or stop at a time."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asynchronous = hasattr(engine, "output_handler")
        self.config: Any = engine.vllm_config if self.asynchronous else engine.llm_engine.vllm_config
        # An LLM is called on one thread of ours, always the same: where its worker lives in this process,
        # a torch.profiler that is stopped on another thread than it was started on ends the process.
        self._thread = ThreadPoolExecutor(1, "stepscope-vllm-llm")
        self._home: asyncio.AbstractEventLoop | None = None
        self.told: Sequence[Mapping[str, Any]] = ()
        """The answer of each worker's `stepscope_release` after the latest stop."""
        self._aimed: Path | None = None
        """The folder of the capture that the workers were told of, until they are told of its end."""

    # What it says of itself.

    @property
    def version(self) -> str:
        return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))

    @property
    def dialect(self) -> Dialect:
        return _versions.dialect_of_engine(self.engine)

    @property
    def settings(self) -> Mapping[str, object]:
        """Of its `ProfilerConfig`; of the environment before there was one (vLLM 0.12 and older)."""
        found = getattr(self.config, "profiler_config", None)
        return _versions.fields_of(found) if found is not None else self.environment

    @property
    def environment(self) -> Mapping[str, object]:
        return arguments.settings_of(self.engine)

    @property
    def folder(self) -> Path:
        """Return the folder that it writes to by default."""
        return Path(str(self.settings.get("torch_profiler_dir") or ""))

    @property
    def layout(self) -> Layout:
        parallel = self.config.parallel_config
        return Layout(
            tp=int(parallel.tensor_parallel_size),
            pp=int(parallel.pipeline_parallel_size),
            dp=int(getattr(parallel, "data_parallel_size", 1) or 1),
            external=getattr(parallel, "distributed_executor_backend", None) == "external_launcher",
            pcp=int(getattr(parallel, "prefill_context_parallel_size", 1) or 1),
        )

    @property
    def in_this_process(self) -> bool:
        """Return whether its one worker lives here too (`LLM` with VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
        if self.asynchronous:
            return False
        core = getattr(self.engine.llm_engine, "engine_core", None)
        return type(core).__name__ == "InprocClient" and self.layout.size == 1

    def takes_aim(self) -> bool:
        """Return whether its workers can be told where and how to record. vllm-ascend's have another
        profiler.
        """
        return not ascend_profiler.is_here() and (self.in_this_process or self.extended())

    def extended(self) -> bool:
        """Return whether its workers have our extension."""
        name = str(getattr(self.config.parallel_config, "worker_extension_cls", "") or "")
        if not name:
            return False
        if name.startswith("stepscope_vllm."):
            return True
        module, _, kind = name.rpartition(".")
        found = getattr(sys.modules.get(module), kind, None)
        if found is None:
            try:
                found = getattr(__import__(module, fromlist=[kind]), kind, None)
            except ImportError:  # importable in the workers only: nothing is known of it here
                return False
        return isinstance(found, type) and issubclass(found, extension.WorkerExtension)

    def facts(self) -> dict[str, str | int | float | bool | None]:
        return {**facts.of_config(self.config, self.layout.size), **facts.scheduler_here()}

    def dead(self) -> str | None:
        """Return the reason why it will not answer any more; None while it lives."""
        core = getattr(self.engine if self.asynchronous else self.engine.llm_engine, "engine_core", None)
        resources = getattr(core, "resources", None)
        if getattr(resources, "engine_dead", False) or (self.asynchronous and self.engine.errored):
            return "the engine is dead (its EngineCore or a worker ended)"
        return None

    # What it is told.

    def bind(self, caller: asyncio.AbstractEventLoop) -> None:
        """Find the event loop of an AsyncLLM; one without a loop yet gets the caller's.

        Raises:
            EngineError: that loop has ended, or is not one for an engine.
        """
        if not self.asynchronous:
            return
        home = self._loop()
        if home is None and work_loop.is_ours(caller):
            raise EngineError(
                "the AsyncLLM has no event loop yet, and this is not one for it. Fix: open the capture with "
                "`async with capture(...)` in the loop that generates, or generate once before"
            )
        self._home = home or caller
        if not self._home.is_running():
            raise EngineError(
                "the event loop of the AsyncLLM does not run now, so the engine cannot be called. Fix: open "
                "the capture with `async with capture(...)` inside that loop"
            )

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started:
        dialect, wanted = self.dialect, capture.iterations
        aimed = await self._aim(capture, name, ranks)
        arguments: dict[str, object] = {}
        by_others = self.settings.get("profiler") == "cuda"
        if dialect.prefix != "no":
            arguments["profile_prefix"] = name
        if dialect.bounds:
            arguments["delay_iterations"] = wanted.start
            arguments["max_iterations"] = wanted.count or 0
        if not dialect.guarded and self.frontend_records():
            raise EngineError(f"start_profile: the AsyncLLM's own profiler records. {_TAKEN}")
        try:
            await self.call("start_profile", **arguments)
        except EngineError:
            if self.frontend_records() is not None:
                await asyncio.sleep(_LIFE_S)  # its own start may be under way on a thread
            await self._end_frontend()
            raise
        if aimed:
            return Started(Path(capture.out_dir), named=True, aimed=True)
        named = dialect.prefix == "every start"
        return Started(self.folder, named=named, aimed=False, by_others=by_others)

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        lost = None
        if not self.dialect.guarded and self.frontend_records() is not None:
            # What stop_profile does, one after the other, and to a profiler that records alone: one stop too
            # many, or two at once, end this very process.
            lost = await self._end_frontend()
            await self.call("collective_rpc", "profile", args=(False,))
        else:
            try:
                await self.call("stop_profile")
            except EngineError:
                await self._end_frontend()
                raise
        left: dict[str, str] = {}
        self.told = ()
        if self._aimed is not None:
            folder, self._aimed = self._aimed, None
            method: Any = extension.release if self.in_this_process else "stepscope_release"
            released = await self.call("collective_rpc", method)
            self.told = [worker for worker in released if worker]
            left = await traces.bring_home(self.call, folder, released)
        return left if lost is None else {**left, "frontend": lost}

    def frontend_records(self) -> bool | None:
        """Return whether the AsyncLLM's own profiler of this process records; None where it has none."""
        found = getattr(self.engine, "profiler", None) if self.asynchronous else None
        if found is None:
            return None
        # A wrapper around a torch.profiler.profile around torch's own, or from the second on.
        while found is not None and not hasattr(found, "kineto_results"):
            found = getattr(found, "profiler", None)
        return found is not None and bool(found.entered) and found.kineto_results is None

    async def _end_frontend(self) -> str | None:
        """Stop the AsyncLLM's own profiler, if it records, also when the engine is dead: left so, this
        process ends in a segmentation fault at its exit. It ends in one as well when a torch.profiler is
        stopped on another thread than it was started on: the one that vLLM has it started on is of its loop.

        Returns:
            Why that failed; without its file the rest is still worth having.
        """
        if not self.frontend_records():
            return None
        try:
            work = self._begin(partial(asyncio.to_thread, self.engine.profiler.stop))
            await asyncio.wait_for(work, _FRONTEND_S)
        except asyncio.TimeoutError:
            return f"the AsyncLLM's own profiler did not stop within {_FRONTEND_S:g} s: its trace is missing"
        except Exception as error:
            return f"the AsyncLLM's own profiler did not stop, so its trace is missing: {_said(error)}"
        return None

    async def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call the engine where it wants to be called.

        Raises:
            EngineError: it is dead, also when it dies meanwhile; or what it raised, as text.
        """
        why = self.dead()
        if why is not None:
            raise EngineError(f"{method}: {why}")
        work = asyncio.ensure_future(self._begin(partial(getattr(self.engine, method), *args, **kwargs)))
        while not work.done():
            await asyncio.wait({work}, timeout=_LIFE_S)
            why = self.dead()
            if why is not None and not work.done():
                work.cancel()
                raise EngineError(f"{method}: {why}")
        try:
            return work.result()
        except Exception as error:
            why = await self._death() if type(error) is Exception else self.dead()
            raise EngineError(f"{method}: {why or _said(error)}") from error

    async def _death(self) -> str | None:
        """Return a call fails a moment before its engine is known to be dead."""
        for _ in range(10):
            why = self.dead()
            if why is not None:
                return why
            await asyncio.sleep(_LIFE_S / 5)
        return None

    async def _begin(self, call: Callable[[], Any]) -> Any:
        if not self.asynchronous:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        if self._home is None:
            raise EngineError("the engine's event loop is not known")

        async def there() -> Any:
            return await call()

        work: Coroutine[Any, Any, Any] = there()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    async def _aim(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> bool:
        """Return whether the workers write this capture as it asks, wherever the engine was told to write."""
        here = self.in_this_process
        if self.settings.get("profiler") != "torch" or not self.takes_aim():
            return False
        spec: extension.Spec = {
            "folder": capture.out_dir,
            "name": name,
            "ranks": ranks,
            "options": options_of(capture, self.settings),
            "activities": list(capture.activities),
            "gzip": bool(self.settings.get("torch_profiler_use_gzip", True)),
            "delay": capture.iterations.start,
            "maximum": capture.iterations.count or 0,
            "all_threads": here,  # generation runs on the user's thread, the profiler on ours
        }
        method: Any = extension.aim if here else "stepscope_aim"
        self._aimed = Path(capture.out_dir)
        await self.call("collective_rpc", method, args=(spec,))
        return True

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        resources = getattr(self.engine.engine_core, "resources", None)
        tasks = (self.engine.output_handler, getattr(resources, "output_queue_task", None))
        return next((task.get_loop() for task in tasks if task is not None), None)


def options_of(capture: EngineCapture, settings: Mapping[str, object]) -> dict[str, bool]:
    """Return the torch.profiler options of a capture, by torch's names. Operations are counted as the
    engine was built to, unless the capture says otherwise.
    """
    flops = "torch_profiler_with_flops"
    return {
        "with_stack": capture.with_stack,
        "record_shapes": capture.record_shapes,
        "profile_memory": capture.profile_memory,
        "with_flops": bool(capture.extra.get(flops, settings.get(flops, False))),
    }


_TAKEN = (
    "Somebody else started its profiler, or a process that ended did. Fix: stop_profile() on the engine "
    "once, then capture"
)


def _said(error: BaseException) -> str:
    """One line of an engine's error; the types of vLLM's own may not exist where the text is read."""
    text = " ".join(str(error).split())
    hint = ""
    if type(error).__name__ == "ProfilerAlreadyActiveError":
        hint = f". {_TAKEN}"
    elif "rofiling is not enabled" in text or "rofiler is not enabled" in text:
        hint = ". Fix: build it with `**stepscope_vllm.engine_args(config, replica)`"
    return f"{type(error).__name__}: {text[-400:]}{hint}"
