"""The run of this process: its id, its `run.json`, and whether this process was prepared."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from stepscope._recording.process import failures
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files.layout import RunLayout
from stepscope.files.run import RunRecord
from stepscope.files.storage import write_atomic

_recorded: set[str] = set()
"""Folders for which `record` has written `run.json`. One writer: `record`."""
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
    """Return eight hex digits that all processes of one run share.

    The id is STEPSCOPE_RUN_ID, or a hash of the Ray job, or agreed on in torch.distributed's store, or
    random. Workers get the id from the process that opens captures.
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


def record(config: ProfileConfig, versions: Callable[[], dict[str, str]]) -> None:
    """Write `run.json` once for this run and folder. `versions` returns the versions of installed
    packages.
    """
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
        write_atomic(layout.run(run_id()), msgspec.json.format(msgspec.json.encode(data)))
    except ours(OSError) as error:
        failures.note("writing run.json", error)
