"""Role, stage, step, replica and rank in the names that frameworks and engines give to their traces.

| writer | name |
|---|---|
| torch | `HOST_PID.TIME.pt.trace.json` |
| verl | `actor_train_step3_rank0-of-8_tp0-pp0-dp0_pid71_TIME.json.gz`: role, scope or stage, step, rank |
| verl's mstx (Ascend) | `3/actor_update/HOST_PID_TIME_ascend_pt/`: step, role or stage |
| verl's engines | below `agent_loop_rollout_replica_0/`, or with the prefix `rollout-replica0-globalrank0_` |
| vLLM | `dp0_pp0_tp0_dcp0_ep0_rank0.TIME.pt.trace.json.gz`, `rank0.TIME...` |
| SGLang | `ID-TP-0-DP-0-EXTEND.trace.json.gz`: the stage where the profiler went by stage |
| torchtitan | `iteration_10/rank0_trace.json.gz` |
| accelerate (TRL, transformers) | `profile_0.json` |
| NeMo-RL | `dtensor_policy_worker_2:5_PID.sqlite`, exported from its nsys reports: steps 2 to 4 |

A rank is also read from `rank0`, `rank_0`, `rank-0` in the file's name, else in that of the nearest folder.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?(\d+)", re.IGNORECASE)
_ACCELERATE = re.compile(r"profile_(\d+)\.json")
_DIMENSION = re.compile(r"(?:^|[^A-Za-z])(tp|pp|dp|ep)[-_]?(\d+)(?=[^0-9]|$)", re.IGNORECASE)
_REPLICA = re.compile(r"replica[-_]?(\d+)", re.IGNORECASE)
_STEP = re.compile(r"(?:iteration|step)[-_]?(\d+)")
_VERL = re.compile(
    r"(?:(?!step\d)(?P<role>[^_]+)_)?(?:(?!step\d)(?P<stage>(?:(?!_step\d|_?rank\d).)+)_)?"
    r"(?:step(?P<step>\d+)[^_]*_)?rank(?P<rank>\d+)(?:-of-(?P<world>\d+))?_(?:[a-z0-9-]+_)?"
    r"(?:pid)?(?P<pid>\d+)_\d{10,}"
)
_NEMO = re.compile(r"(?P<worker>\w+?)_worker(?:_process)?_(?:(?P<first>\d+)[:-](?P<end>\d+)_)?(?P<pid>\d+)\.")
_MSTX = re.compile(
    r"(?:(?P<step>\d+)/)?(?:(?P<role>actor|ref|critic|rollout|reward)_)?(?P<stage>[a-z][a-z_]*)"
    r"/[^/]+_(?P<pid>\d+)_\d{17}_ascend_pt/"
)
"""Folder of verl's NPU profiler. A folder that names neither a step nor a role is the user's own."""
_SGLANG = re.compile(r"-TP-\d+.*-(EXTEND|DECODE|prefill|decode)\.")
_STAGES = {"EXTEND": "prefill", "DECODE": "decode"}


class Named(NamedTuple):
    """Facts in a trace's path, each None if its name does not say it."""

    role: str | None = None
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    world_size: int | None = None
    replica: int | None = None
    pid: int | None = None
    steps: range = range(0)
    """Steps that the trace covers, empty if its name does not say it."""


def named(path: str) -> Named:
    """Return what the path of a trace says of it, relative to the folder that was given."""
    *folders, name = path.split("/")
    verl, nemo, replica = _VERL.match(name), _NEMO.match(name), _REPLICA.search(path)
    by_stage = _SGLANG.search(name)
    of_verl: dict[str, str | None] = {} if verl is None else verl.groupdict()
    mstx = _MSTX.search(path)
    if mstx is not None and (mstx["step"] or mstx["role"]):
        of_verl = mstx.groupdict()
    step = of_verl.get("step") or next((m[1] for m in map(_STEP.fullmatch, reversed(folders)) if m), None)
    role = of_verl.get("role")
    if nemo is not None:
        role = _role_of(nemo["worker"])
    steps = range(0) if step is None else range(int(step), int(step) + 1)
    if nemo is not None and nemo["first"] is not None:
        steps = range(int(nemo["first"]), int(nemo["end"]))
        step = nemo["first"] if len(steps) == 1 else None
    return Named(
        role="rollout" if replica is not None else role,
        stage=of_verl.get("stage") if by_stage is None else _STAGES.get(by_stage[1], by_stage[1]),
        step=_number(step),
        rank=_rank(path),
        world_size=_number(of_verl.get("world")),
        replica=None if replica is None else int(replica[1]),
        pid=_number(of_verl.get("pid") if nemo is None else nemo["pid"]),
        steps=steps,
    )


def dimensions(name: str) -> dict[str, int]:
    """Return the place in the parallel layout that a file's name says: `{"tp": 0, "dp": 1}`."""
    return {key.lower(): int(number) for key, number in _DIMENSION.findall(name)}


def _role_of(worker: str) -> str:
    """Return the role of a worker of NeMo-RL."""
    if "generation" in worker or worker.startswith(("vllm", "sglang", "trtllm")):
        return "rollout"
    return "actor" if "policy" in worker else worker


def _rank(path: str) -> int | None:
    names = path.split("/")
    accelerate = _ACCELERATE.match(names[-1])
    if accelerate is not None:
        return int(accelerate[1])
    matches = map(_RANK.search, reversed(names))
    return next((int(match[1]) for match in matches if match is not None), None)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
