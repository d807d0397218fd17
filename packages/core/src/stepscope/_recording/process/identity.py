"""Facts about this process: role, rank, host, device, versions of packages, event loop, and connection to
Ray.

A rank is never guessed. This module does not import torch or asyncio, and does not initialise a device.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope._recording.process import failures, fork
from stepscope.config import ProfileConfig, ThroughputConfig
from stepscope.engines.protocol import distributions
from stepscope.errors import ours
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Hardware
from stepscope.files.run import RunRecord
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import write_atomic, write_new
from stepscope.files.values import bounded

IMPORTED_NS = time.time_ns()
"""`ProcessPart.imported_ns` of this process. A forked child has the time of its parent."""

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


def identify(
    role: str,
    *,
    rank: int | None = None,
    position: int | None = None,
    world_size: int | None = None,
    actor_id: str | None = None,
    replica: int | None = None,
) -> ProcessInfo:
    """Return the identity of this process. Its rank is `rank`, or from STEPSCOPE_RANK, torch.distributed,
    RANK or `position`, in this order; None if all are unknown.
    """
    number, size, source = _rank(rank, position)
    return ProcessInfo(
        role=role,
        rank=number,
        world_size=size if size is not None else world_size,
        rank_source=source,
        host=socket.gethostname(),
        pid=os.getpid(),
        actor_id=actor_id,
        replica=replica,
    )


def _rank(rank: int | None, position: int | None) -> tuple[int | None, int | None, str | None]:
    if rank is not None:
        return rank, None, "argument"
    stated = _integer("STEPSCOPE_RANK")
    if stated is not None:
        return stated, None, "environment"
    distributed = torch_rank()
    if distributed is not None:
        return (*distributed, "torch.distributed")
    launched = _integer("RANK")
    if launched is not None:
        return launched, _integer("WORLD_SIZE"), "environment"
    return position, None, None if position is None else "position"


def is_alone() -> bool:
    """Return True unless this process is one of several ranks of torch.distributed."""
    distributed = torch_rank()
    return distributed is None or distributed[1] == 1


def place() -> tuple[int, int]:
    """Return (rank, world size) of this process among the processes that a launcher started.

    Without a launcher, return (0, 1). The launcher's variables are used if torch.distributed is a group of
    one process, which an engine may have initialised.
    """
    distributed = torch_rank()
    if distributed is not None and distributed[1] > 1:
        return distributed
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    return (0, 1) if rank is None or size is None else (rank, size)


def torch_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of this process in torch.distributed, or None. A forked child of a rank gets
    None.
    """
    group = _world()
    if group is None or group is _group_of_the_parent:
        return None
    distributed = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()


def _world() -> object:
    """Return torch's default process group, or None."""
    # torch is not imported here, which would take a second.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _integer(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def in_ray_worker() -> bool:
    """Return whether this process is a worker of Ray, for tasks or actors."""
    return os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"


def is_first() -> bool:
    """Return whether this process logs messages that concern all processes of its run. Rank 0 does, or
    without ranks, the main process.
    """
    rank = os.environ.get("RANK")
    if rank is not None:
        return rank == "0"
    return not (is_child() or in_ray_worker())


def is_child() -> bool:
    """Return whether `multiprocessing` started this process."""
    multiprocessing = sys.modules.get("multiprocessing")  # imported in a child
    return multiprocessing is not None and multiprocessing.parent_process() is not None


_MODULES = (("torch", "cuda"), ("torch_npu", "npu"))
"""(library, module) of devices. `torch_npu.npu` has the functions of `torch.cuda`, which also serves ROCm."""


def read_hardware(config: ThroughputConfig) -> Hardware:
    """Return the device that this process computes on, and the figures in `config`. Never raise."""
    device = gpu = None
    try:
        for kind, module in initialised():
            device = bounded(str(module.get_device_name()))
            gpu = _gpu(module.current_device()) if kind == "cuda" else None
            break
    except ours() as error:  # for example a driver error
        failures.warn("stepscope: the device of this process is unknown: %s", failures.describe(error))
    return Hardware(
        device=device,
        gpu=gpu,
        peak_tflops=config.device_peak_tflops,
        flops_per_token=config.flops_per_token,
    )


def _gpu(index: int) -> int | None:
    """Return the number that `nvidia-smi` shows for a device of torch, or None if CUDA_VISIBLE_DEVICES has
    names instead of numbers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    numbers = [int(name) if name.strip().isdecimal() else None for name in visible.split(",")]
    return numbers[index] if index < len(numbers) else None


def initialised() -> Iterator[tuple[str, Any]]:
    """Yield (`cuda` or `npu`, torch's module) of each kind of device that this process has initialised."""
    for library, kind in _MODULES:
        module = getattr(sys.modules.get(library), kind, None)
        if module is not None and module.is_initialized():
            yield kind, module


_NAMED = ("stepscope", "torch", "ray", "torch_npu")


def versions() -> dict[str, str]:
    """Return {name: version} of Python, and of installed packages that matter for a recording."""
    found = {name: installed_version(name) for name in dict.fromkeys((*_NAMED, *distributions()))}
    known = {name: version for name, version in found.items() if version is not None}
    return {"python": sys.version.split()[0], **known}


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # imported here: 15 ms

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_of_the_parent: object = None
"""Ray's worker object that this process has inherited by a fork, or None. One writer: `_forget`."""
_group_of_the_parent: object = None
"""torch's default process group that this process has inherited by a fork, or None. One writer: `_forget`."""


def connected() -> Any:
    """Return the module `ray` if this process is connected to Ray, else None.

    Return None in a forked child, because a query on the inherited connection would hang, and so would later
    queries of the parent.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    is_shared = _of_the_parent is not None and _worker(ray) is _of_the_parent
    return None if is_shared else ray


def waits_for_tasks() -> bool:
    """Return whether this process is a Ray worker that runs no task now. Call this on the main thread."""
    ray = connected()
    if ray is None:
        return False
    context = ray.get_runtime_context()
    return context.worker.mode == ray.WORKER_MODE and context.get_task_id() is None


def _worker(ray: Any) -> object:
    return getattr(ray.get_runtime_context().worker, "core_worker", None)


def _forget() -> None:
    global _of_the_parent, _group_of_the_parent
    _group_of_the_parent = _world()
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _of_the_parent = _worker(ray)


fork.forgets("connections of the parent", _forget)


def in_event_loop() -> bool:
    """Return whether an event loop is running on this thread."""
    return running_loop() is not None


def running_loop() -> AbstractEventLoop | None:
    """Return the running event loop of this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    return None if asyncio is None else asyncio._get_running_loop()


_recorded: set[str] = set()
"""Folders for which `record_run` has written `run.json`. One writer: `record_run`."""
_ids: dict[str, str] = {}
"""{"run": id of this run}, or empty. A dict, because `dict.setdefault` is atomic: the first capture and the
thread that listens for requests may need the id at the same time. One writer: `run_id`."""
_prepared_in = 0
"""Process id of the process that was prepared, or 0. A forked child counts as not prepared. One writer:
`mark_prepared`."""


def mark_prepared() -> None:
    """Record that this process was prepared."""
    global _prepared_in
    _prepared_in = os.getpid()


def is_prepared() -> bool:
    return _prepared_in == os.getpid()


def run_id() -> str:
    """Return the id that all processes of one run share.

    The id is STEPSCOPE_RUN_ID, else eight hex digits: a hash of the Ray job, or without Ray, a random number.
    Ranks agree on the number in torch.distributed's store. Workers get the id from the process that opens
    captures.
    """
    known = _ids.get("run")
    if known is None:
        given = os.environ.get("STEPSCOPE_RUN_ID") or _of_ray_job() or _agreed(os.urandom(4).hex())
        known = _ids.setdefault("run", given)
    return known


def _of_ray_job() -> str | None:
    # Before torch's store, because worker groups that open their own captures have different stores but the
    # same job.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    try:
        context = ray.get_runtime_context()
        job = f"{context.get_session_name()}/{context.get_job_id()}"
    except ours() as error:
        failures.note("reading the Ray job's id", error)
        return None
    return sha256(job.encode()).hexdigest()[:8]


def _agreed(proposal: str) -> str:
    # The store is used without a collective, so a rank that never captures does not block the others.
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return proposal
    try:
        store = distributed._get_default_store()
        return str(store.compare_set("stepscope/run_id", "", proposal).decode())
    except ours() as error:
        failures.note("agreeing on a run id", error)
        return proposal


def record_run(config: ProfileConfig) -> None:
    """Write `run.json` once for this run and folder."""
    if config.save_path in _recorded:
        return
    _recorded.add(config.save_path)
    layout = RunLayout(config.save_path)
    data = RunRecord(
        run_id=run_id(),
        started_ns=time.time_ns(),
        host=socket.gethostname(),
        pid=os.getpid(),
        command=tuple(sys.argv),
        config=config.to_mapping(),
        versions=versions(),
    )
    try:
        Path(config.save_path).mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(data))
        if not write_new(layout.run(run_id()), text):  # another run has just written `run.json`
            write_atomic(layout.run(run_id()), text)
    except ours(OSError) as error:
        failures.note("writing run.json", error)
