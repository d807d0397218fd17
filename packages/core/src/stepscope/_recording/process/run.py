"""The run that this process takes part in: its id, its `run.json`, and whether this process is prepared."""

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
from stepscope.files.storage.atomic import write_atomic

_recorded: set[str] = set()
"""Folders that already have a `run.json` of this run. One writer: `record`."""
_ids: dict[str, str] = {}
"""The id of this run, under one key. `dict.setdefault` is atomic: a thread that listens for requests may ask
for the id at the same time as the first capture. One writer: `run_id`."""
_prepared_in = 0
"""Id of the process that was prepared, or 0. A forked child was not prepared. One writer: `mark_prepared`."""


def mark_prepared() -> None:
    """Record that this process was prepared for its first captured step."""
    global _prepared_in
    _prepared_in = os.getpid()


def is_prepared() -> bool:
    return _prepared_in == os.getpid()


def run_id() -> str:
    """Return eight hex digits that all processes of one run share.

    They come from STEPSCOPE_RUN_ID, from the Ray job, from torch.distributed's store, or from this process
    itself, which then sends them to its workers.
    """
    known = _ids.get("run")
    if known is None:
        given = os.environ.get("STEPSCOPE_RUN_ID") or _of_ray_job() or _agreed(os.urandom(4).hex())
        known = _ids.setdefault("run", given)
    return known


def _of_ray_job() -> str | None:
    # Worker groups that open captures by themselves have a torch store each, but one job.
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
    # The store answers without a collective: a rank that never captures does not block the others.
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
    """Write `run.json` if this run has none yet. `versions` returns the versions of the installed
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
