"""Extension of vLLM's workers that sets the profiler to one capture's folder, name and options.

`WorkerExtension` is named to the engine as `worker_extension_cls`. An engine whose worker lives in this
process needs no extension, because stepscope calls `aim` itself. `aim` changes these attributes of vLLM:

>= 0.31   `TorchProfilerWrapper._profiler_kwargs`, the arguments of the torch.profiler.profile that each start
          makes; from 0.33 on also `_base_profiler_kwargs`, from which a start computes `_profiler_kwargs`
>= 0.12   `TorchProfilerWrapper.profiler`, one torch.profiler.profile for the life of the process
older     `Worker.profiler`, which is a torch.profiler.profile itself
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stepscope_vllm._engine_side.trace_writer import drop, probe, writer

Spec = dict[str, Any]
"""Values that are sent to a worker. They have built-in types, because vLLM packs them with msgpack.

folder: str                folder for the files of this capture
name: str                  prefix of the file names
ranks: list[int] | None    ranks of this engine that write a file; None for all
options: dict[str, bool]   options of torch.profiler: with_stack, record_shapes, profile_memory, with_flops
activities: list[str]      `cpu`, `cuda`
gzip: bool
delay, maximum: int        range of engine iterations, for versions whose start does not take a range
all_threads: bool          True to record also the threads that did not start the profiler
"""

PIECE = 8 << 20
"""Number of bytes of a file that are sent in one piece."""


class WorkerExtension:
    """Worker extension for the engine's argument `worker_extension_cls="stepscope_vllm.WorkerExtension"`.

    If you have an extension of your own, name a class that inherits from both.
    """

    def stepscope_aim(self, spec: Spec) -> None:
        """Set the folder, the name and the options of the next recording."""
        aim(self, spec)

    def stepscope_release(self) -> dict[str, Any]:
        """Restore the profiler's own settings after a stop, because other code may start the profiler.

        Returns:
            The worker's host and process, the files that the worker wrote, its number of iterations since
            `stepscope_aim`, and its stalls: the times in which the profiler started or wrote.
        """
        return release(self)

    def stepscope_read(self, path: str, offset: int) -> bytes | None:
        """Return a piece of a file of the last capture, for a process that does not see this worker's disk.

        Return an empty piece at the end of the file, and None if another worker wrote the file.
        """
        worker: Any = self
        if path not in getattr(worker, "_stepscope_wrote", ()) or not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(PIECE)


def aim(worker: Any, spec: Spec) -> None:
    """Set the folder, the name and the options of a worker's next recording.

    Raises:
        RuntimeError: the worker is recording.
        OSError: the folder cannot be made or written.
    """
    from stepscope.backends.torch import record_function_scopes  # imported here: only captures need it
    from stepscope_vllm._engine_side import plugin

    worker = getattr(worker, "worker", worker)  # an executor in this process passes a wrapper of its worker
    record_function_scopes.watch()
    plugin.load()  # VLLM_PLUGINS may have kept vLLM from loading the plugin
    made = getattr(worker, "profiler", None) is None
    wrapper = _wrapper(worker, spec)
    if getattr(wrapper, "_active", False):
        raise RuntimeError("the worker's profiler is active: somebody else started it")
    rank = int(worker.rank)
    wanted = spec["ranks"] is None or rank in spec["ranks"]
    wrote: list[str] = []
    folder, stem = Path(spec["folder"]), f"{spec['name']}_dp{dp_of(worker.vllm_config)}_rank{rank}"
    handler = writer(folder, stem, wrote, gzip=spec["gzip"]) if wanted else drop
    if wanted:
        probe(folder)
    release(worker)  # an earlier capture may never have called `release`
    worker._stepscope_wrote = wrote
    undo = ExitStack()
    if made:
        undo.callback(setattr, worker, "profiler", None)
    _set_options(undo, wrapper, _settings(spec, handler))
    _skip_tables(undo, wrapper)
    _set_bounds(undo, wrapper, spec)
    _watch(worker, wrapper, undo)
    worker._stepscope_undo = undo


def _settings(spec: Spec, handler: Callable[[Any], None]) -> dict[str, Any]:
    """Return the arguments of torch.profiler.profile for a capture."""
    settings = dict(spec["options"], on_trace_ready=handler)
    activities = _activities(spec["activities"])
    if activities:
        settings["activities"] = activities
    if spec["all_threads"]:
        from torch._C._profiler import _ExperimentalConfig

        settings["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
    return settings


def _set_options(undo: ExitStack, wrapper: Any, settings: dict[str, Any]) -> None:
    if hasattr(wrapper, "_profiler_kwargs"):
        # From 0.33 on, a start computes the first attribute from the second.
        for kept in ("_profiler_kwargs", "_base_profiler_kwargs"):
            if hasattr(wrapper, kept):
                _set(undo, wrapper, kept, {**getattr(wrapper, kept), **settings})
        _set(undo, wrapper, "_custom_trace_handler", True)  # else a start replaces the handler
        return
    inner = getattr(wrapper, "profiler", wrapper)
    for name, value in settings.items():
        _set(undo, inner, name, set(value) if name == "activities" else value)


def _skip_tables(undo: ExitStack, wrapper: Any) -> None:
    """Skip vLLM's tables of operators, which take longer than the trace and contain less than the report."""
    for table in ("dump_cpu_time_total", "dump_device_time_total"):
        if hasattr(wrapper, table):
            _set(undo, wrapper, table, False)
    if getattr(wrapper, "profiler_config", None) is not None:
        _set(undo, wrapper.profiler_config, "torch_profiler_dump_cuda_time_total", False)


def _set_bounds(undo: ExitStack, wrapper: Any, spec: Spec) -> None:
    """Set the range of engine iterations to record, for versions whose start accepts no range."""
    if not hasattr(wrapper, "_default_max_iters") and hasattr(wrapper, "_max_iters"):
        _set(undo, wrapper, "_delay_iters", spec["delay"])
        _set(undo, wrapper, "_max_iters", spec["maximum"])


def release(worker: Any) -> dict[str, Any]:
    """Undo the changes of `aim`. Return the same report as `WorkerExtension.stepscope_release`."""
    worker = getattr(worker, "worker", worker)
    undo = getattr(worker, "_stepscope_undo", None)
    if undo is not None:
        worker._stepscope_undo = None
        undo.close()
    seen = getattr(worker, "_stepscope_seen", None) or {}
    wrote = list(getattr(worker, "_stepscope_wrote", ()))
    return {"host": socket.gethostname(), "pid": os.getpid(), "wrote": wrote, **seen}


_DOING = {"_start": "starting", "_stop": "writing"}
"""{method of vLLM's `WorkerProfiler` (from 0.12 on) that blocks the worker: value of `Stall.doing`}."""


def _watch(worker: Any, wrapper: Any, undo: ExitStack) -> None:
    """Record the times at which the worker's profiler starts and writes, and count its iterations."""
    seen: dict[str, Any] = {"stalls": [], "ran": None}
    worker._stepscope_seen = seen
    if not hasattr(wrapper, "step"):
        return
    for name, doing in _DOING.items():
        if hasattr(wrapper, name):
            _shadow(undo, wrapper, name, _timed(getattr(wrapper, name), doing, seen["stalls"]))
    step, seen["ran"] = wrapper.step, 0

    def counted() -> Any:
        seen["ran"] += 1
        return step()

    _shadow(undo, wrapper, "step", counted)


def _timed(method: Callable[[], Any], doing: str, stalls: list[tuple[str, int, int]]) -> Callable[[], Any]:
    def timed() -> Any:
        began_ns = time.time_ns()
        try:
            return method()
        finally:
            stalls.append((doing, began_ns, time.time_ns()))

    return timed


def _wrapper(worker: Any, spec: Spec) -> Any:
    """Return the worker's profiler. Make the profiler now if vLLM makes it only at the first start."""
    if getattr(worker, "profiler", None) is None:
        from vllm.profiler import wrapper

        config = getattr(worker, "profiler_config", None) or worker.vllm_config.profiler_config
        if hasattr(wrapper, "create_worker_profiler"):
            worker.profiler = wrapper.create_worker_profiler(
                config, worker_name=spec["name"], local_rank=worker.local_rank
            )
        else:
            worker.profiler = wrapper.TorchProfilerWrapper(
                config,
                worker_name=spec["name"],
                local_rank=worker.local_rank,
                activities=["CPU", "CUDA"],
            )
    return worker.profiler


def dp_of(vllm_config: Any) -> int:
    """Return the number of this process' data-parallel engine, from 0.

    For dense models, data-parallel engines are independent: `data_parallel_rank` is 0 in all of them, and
    only `data_parallel_index` differs.
    """
    parallel = vllm_config.parallel_config
    for name in ("data_parallel_index", "data_parallel_rank"):
        if isinstance(number := getattr(parallel, name, None), int):
            return number
    return 0


def _activities(wanted: list[str]) -> list[Any]:
    """Return the wanted activities that torch supports in this process. Empty on an NPU: the worker then
    keeps its own activities.
    """
    from torch.profiler import ProfilerActivity, supported_activities

    named = [getattr(ProfilerActivity, name.upper(), None) for name in wanted]
    return [kind for kind in named if kind in supported_activities()]  # type: ignore[no-untyped-call]  # torch


def _set(undo: ExitStack, target: Any, name: str, value: Any) -> None:
    """Set an attribute of one of vLLM's objects until `undo` is closed."""
    undo.callback(setattr, target, name, getattr(target, name, None))
    setattr(target, name, value)


def _shadow(undo: ExitStack, target: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of an object until `undo` is closed."""
    setattr(target, name, method)
    undo.callback(vars(target).pop, name, None)
