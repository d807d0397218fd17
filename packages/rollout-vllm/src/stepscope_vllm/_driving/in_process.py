"""The target of a capture if the engine is in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.engines import EngineCapture, pass_socket
from stepscope.engines.actor_call import arrive
from stepscope.engines.artifacts import Option
from stepscope.errors import EngineError, RecordError
from stepscope.files.passes import PassFile
from stepscope_vllm import _versions
from stepscope_vllm._driving import ascend_profiler, built_settings, target
from stepscope_vllm._driving.engine_calls import TAKEN, EngineCalls, described
from stepscope_vllm._driving.target import PASSES_NEEDED, Started
from stepscope_vllm._engine_side import extension, passes, plugin
from stepscope_vllm._files.traces import Layout
from stepscope_vllm._versions import Dialect

Call = Callable[..., Awaitable[Any]]
"""`EngineCalls.call`."""


async def bring_home(call: Call, folder: Path, reports: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Copy the traces that workers wrote to disks that this process does not see, on other hosts.

    A worker with stepscope's extension returns the files of its last capture in pieces, through the engine's
    own calls. The worker keeps its files.

    Args:
        folder: The capture's folder. Files in other folders are not copied.
        reports: The answers of the workers' `stepscope_release`.

    Returns:
        `{"worker on <host>": reason}` for files that could not be copied.
    """
    absent: dict[str, str] = {}
    for worker in reports:
        for name in worker.get("wrote", ()):
            if await asyncio.to_thread(os.path.exists, name):
                continue
            host = worker["host"]
            try:
                if Path(name).parent != folder:
                    raise EngineError(f"it is not in {folder}")
                await arrive(Path(name), partial(_piece, call, name))
            except (EngineError, OSError) as error:
                absent[f"worker on {host}"] = f"{name} was not copied from there: {error}"
    return absent


async def _piece(call: Call, path: str, offset: int) -> bytes:
    answers = await call("collective_rpc", "stepscope_read", args=(path, offset))
    pieces = [piece for piece in answers if piece is not None]
    if not pieces:
        raise EngineError("no worker has it any more")
    return bytes(pieces[0])


_FRONTEND_STARTS_S = 0.5
"""Longest wait for the start of the AsyncLLM's own profiler, which runs on another thread."""
_FRONTEND_S = 60.0
"""Longest wait for the trace of the AsyncLLM's own profiler. If the event loop has ended, vLLM never writes
the trace."""


class InProcessTarget:
    """An `AsyncLLM` or an `LLM`. Its methods are called one at a time, from the work loop."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls = EngineCalls(engine)
        asynchronous = self.calls.asynchronous
        self.config: Any = engine.vllm_config if asynchronous else engine.llm_engine.vllm_config
        self.reports: Sequence[Mapping[str, Any]] = ()
        self._passes: Sequence[PassFile] = ()
        self._noting: str | bool = False
        """True while passes are noted, False if none are wanted, or the reason why passes cannot be noted."""
        self._profiles = True
        """False if the capture notes passes without running the profiler."""
        self._aimed: Path | None = None
        """Capture folder to which the workers' profilers write now, or None if no capture has set a
        folder."""

    # Facts about the engine.

    @property
    def version(self) -> str:
        return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))

    @property
    def dialect(self) -> Dialect:
        return _versions.dialect_of_engine(self.engine)

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the settings of the engine's `ProfilerConfig`; for vLLM 0.12 and older, the settings from
        the environment.
        """
        config = getattr(self.config, "profiler_config", None)
        return _versions.fields_of(config) if config is not None else self.environment

    @property
    def environment(self) -> Mapping[str, object]:
        return built_settings.settings_of(self.engine)

    @property
    def folder(self) -> Path:
        """Return the folder that the engine writes to by default."""
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
        """Return whether the engine's only worker is in this process (`LLM` with
        VLLM_ENABLE_V1_MULTIPROCESSING=0).
        """
        if self.calls.asynchronous:
            return False
        core = getattr(self.engine.llm_engine, "engine_core", None)
        return type(core).__name__ == "InprocClient" and self.layout.size == 1

    def takes_aim(self) -> bool:
        """Return whether each capture can set the folder and the options of the workers' profilers.

        This is not possible for workers of vllm-ascend, which have another profiler.
        """
        return not ascend_profiler.is_here() and (self.in_this_process or self.extended())

    def extended(self) -> bool:
        """Return whether the engine's workers have stepscope's extension."""
        name = str(getattr(self.config.parallel_config, "worker_extension_cls", "") or "")
        if not name:
            return False
        if name.startswith("stepscope_vllm."):
            return True
        module, _, attribute = name.rpartition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        if kind is None:
            try:
                kind = getattr(__import__(module, fromlist=[attribute]), attribute, None)
            except ImportError:  # only the workers can import the class, so it is unknown here
                return False
        return isinstance(kind, type) and issubclass(kind, extension.WorkerExtension)

    def facts(self) -> dict[str, Option]:
        return {**target.of_config(self.config, self.layout.size), **target.scheduler_here(self.engine)}

    # The engine's profiler.

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started:
        self._profiles = capture.profiler
        if not capture.profiler:
            await self._begin_passes(capture.passes)
            if self._noting is not True:
                raise EngineError(f"{self._noting or 'engine.passes is 0'}, and engine.profiler is passes")
            return Started(Path(capture.out_dir), named=True, aimed=True)
        dialect = self.dialect
        aimed = await self._aim(capture, name, ranks)
        if not dialect.guarded and frontend_records(self.calls):
            raise EngineError(f"start_profile: the AsyncLLM's own profiler records. {TAKEN}")
        await self._begin_passes(capture.passes)
        try:
            await self.calls.call("start_profile", **_start_arguments(capture, name, dialect))
        except BaseException as error:
            await self._end_passes()
            if not isinstance(error, EngineError):
                raise
            if frontend_records(self.calls) is not None:
                await asyncio.sleep(_FRONTEND_STARTS_S)
            await stop_frontend(self.calls)
            raise
        if aimed:
            return Started(Path(capture.out_dir), named=True, aimed=True)
        named = dialect.prefix == "every start"
        by_others = self.settings.get("profiler") == "cuda"
        return Started(self.folder, named=named, aimed=False, by_others=by_others)

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        failures = await self._end_passes()
        if not self._profiles:
            return failures
        if not self.dialect.guarded and frontend_records(self.calls) is not None:
            # This does the steps of stop_profile one after the other, and only for profilers that record,
            # because a stop too many, or two stops at once, would crash this process.
            trouble = await stop_frontend(self.calls)
            await self.calls.call("collective_rpc", "profile", args=(False,))
            if trouble is not None:
                failures["frontend"] = trouble
        else:
            try:
                await self.calls.call("stop_profile")
            except EngineError:
                await stop_frontend(self.calls)
                raise
        return {**await self._release(), **failures}

    def take_passes(self) -> Sequence[PassFile]:
        """Return the notes of the passes that the latest stop took from the engine."""
        taken, self._passes = self._passes, ()
        return taken

    def keep_passes(self, memory_mb: int) -> bool:
        """See `EngineProfilerBase`."""
        if not plugin.is_chosen():
            return True
        if self.in_this_process:
            plugin.load()
        return self._ask_now(pass_socket.KEEP, memory_mb) is not None

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        """See `EngineProfilerBase`."""
        contents = self._ask_now(pass_socket.KEPT, start_ns)
        return [passes.file_of(content) for content in contents or () if content is not None]

    def _ask_now(self, question: str, number: int) -> list[Any] | None:
        """Return the answers of all cores to a question of `pass_socket`; None if the cores cannot be asked
        now.
        """
        answers = self.calls.ask_cores_now(passes.ANSWERS[question], number)
        if answers is not None or self.calls.asynchronous:
            return answers
        return pass_socket.ask_all(self.calls.pids_of_cores(), question, number)

    async def _begin_passes(self, most: int) -> None:
        self._passes, self._noting = (), False
        if not most:
            return
        if self.in_this_process:
            plugin.load()
        try:
            await self.calls.ask_cores(passes.BEGIN, most)
            self._noting = True
        except EngineError as error:
            self._noting = f"{error}. {PASSES_NEEDED}"

    async def _end_passes(self) -> dict[str, str]:
        """End the notes of passes, and keep the notes for `take_passes`. Return {failed part: reason}."""
        noting, self._noting = self._noting, False
        if noting is True:
            try:
                contents = await self.calls.ask_cores(passes.END)
                self._passes = [passes.file_of(content) for content in contents if content is not None]
            except (EngineError, RecordError) as error:
                noting = str(error)
        return {"passes": noting} if isinstance(noting, str) else {}

    async def _aim(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> bool:
        """Set the capture's folder and options in the workers' profilers. Return False if the workers do not
        support it.
        """
        if self.settings.get("profiler") != "torch" or not self.takes_aim():
            return False
        here = self.in_this_process
        spec: extension.Spec = {
            "folder": capture.out_dir,
            "name": name,
            "ranks": ranks,
            "options": options_of(capture, self.settings),
            "activities": list(capture.activities),
            "gzip": bool(self.settings.get("torch_profiler_use_gzip", True)),
            "delay": capture.iterations.start,
            "maximum": capture.iterations.count or 0,
            # Generation runs on the user's thread, but the profiler is started on stepscope's thread.
            "all_threads": here,
        }
        method: Any = extension.aim if here else "stepscope_aim"
        self._aimed = Path(capture.out_dir)
        await self.calls.call("collective_rpc", method, args=(spec,))
        return True

    async def _release(self) -> dict[str, str]:
        """Restore the workers' profilers, and copy their files from disks that this process does not see.

        Returns:
            {part that failed: reason}
        """
        self.reports = ()
        if self._aimed is None:
            return {}
        folder, self._aimed = self._aimed, None
        method: Any = extension.release if self.in_this_process else "stepscope_release"
        reports = await self.calls.call("collective_rpc", method)
        self.reports = [report for report in reports if report]
        return await bring_home(self.calls.call, folder, self.reports)


def _start_arguments(capture: EngineCapture, name: str, dialect: Dialect) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if dialect.prefix != "no":
        arguments["profile_prefix"] = name
    if dialect.bounds:
        arguments["delay_iterations"] = capture.iterations.start
        arguments["max_iterations"] = capture.iterations.count or 0
    return arguments


def options_of(capture: EngineCapture, settings: Mapping[str, object]) -> dict[str, bool]:
    """Return {option of torch.profiler: value} for a capture.

    `with_flops` is the capture's `torch_profiler_with_flops`, or else the engine's own setting.
    """
    flops = "torch_profiler_with_flops"
    return {
        "with_stack": capture.with_stack,
        "record_shapes": capture.record_shapes,
        "profile_memory": capture.profile_memory,
        "with_flops": bool(capture.extra.get(flops, settings.get(flops, False))),
    }


def frontend_records(calls: EngineCalls) -> bool | None:
    """Return whether the AsyncLLM's own profiler records, or None if the engine has no such profiler.

    This profiler records the process in which the AsyncLLM lives. An LLM never has such a profiler.
    """
    profiler = getattr(calls.engine, "profiler", None) if calls.asynchronous else None
    if profiler is None:
        return None
    # vLLM's wrapper holds a torch.profiler.profile, which holds torch's inner profiler. Some releases omit
    # the wrapper.
    while profiler is not None and not hasattr(profiler, "kineto_results"):
        profiler = getattr(profiler, "profiler", None)
    return profiler is not None and bool(profiler.entered) and profiler.kineto_results is None


async def stop_frontend(calls: EngineCalls) -> str | None:
    """Stop the AsyncLLM's own profiler if it records, even if the engine is dead.

    If the profiler is left running, the process crashes with a segmentation fault at its exit. The process
    also crashes if a torch.profiler is stopped on another thread than it was started on, so the stop runs on
    a thread of the AsyncLLM's event loop, where vLLM starts the profiler.

    Returns:
        The reason if the stop failed, else None. The other traces of the capture are usable in both cases.
    """
    if not frontend_records(calls):
        return None
    try:
        work = calls.run(partial(asyncio.to_thread, calls.engine.profiler.stop))
        await asyncio.wait_for(work, _FRONTEND_S)
    except asyncio.TimeoutError:
        return f"the AsyncLLM's own profiler did not stop within {_FRONTEND_S:g} s: its trace is missing"
    except Exception as error:
        return f"the AsyncLLM's own profiler did not stop, so its trace is missing: {described(error)}"
    return None
