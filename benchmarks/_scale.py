"""Steps of hundreds of ranks, made from a real torch trace. The same trace and seed give the same step.

Two processes record training steps that end in an all-reduce by gloo. The second process is always late, and
the first process' trace is used. Each rank gets this trace with its node's clock, repeated to the requested
size. The trace has no GPU events, so a kernel of the same duration is added for each matrix product, and an
NCCL kernel for each all-reduce. A few ranks are late at the all-reduces, some are missing, and some have a
broken file.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from _traces import _BASE_S, _later, describe
from isal import isal_zlib

from stepscope.files.manifest import Absent
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder

MS = 1_000_000
ON_A_NODE = 8
"""Ranks of one node. Each node has its own clock."""
_DELAYS_US = (0, 100, 200, 300, 500, 800, 1200, 2000)
"""Delays of ranks before an all-reduce. Stragglers have the last delay."""
_LATE_US = 4000
"""Delay of the second recording process, which is longer than all of `_DELAYS_US`."""
_EVENT = re.compile(
    rb'"ph": "X",\s*"cat": "(\w+)",\s*"name": "([\w:]+)",\s*"pid": \d+,\s*"tid": \d+,\s*'
    rb'"ts": ([\d.]+),\s*"dur": ([\d.]+)'
)
_PRODUCTS = (b"aten::mm", b"aten::addmm", b"aten::bmm")


class ScaledStep(NamedTuple):
    path: Path
    ranks: int
    """Ranks with a trace, also if it is broken."""
    json_bytes: int
    """Size of the JSON of all traces together."""
    disk_bytes: int
    missing: int
    broken: int


class _Variant(NamedTuple):
    """The compressed events of all ranks with the same delay."""

    members: bytes
    size: int


class Ranks:
    """The recorded trace, from which the traces of all ranks are made."""

    def __init__(self, trace: bytes, size: int) -> None:
        """Prepare the events for each delay. `size` is the size of the JSON of each rank."""
        start = re.search(rb'"traceEvents": \[\s*', trace)
        assert start is not None
        end = trace.rindex(b"]")
        self._head, self._tail = trace[: start.end()], trace[end:]
        events = trace[start.end() : end].rstrip()
        seconds = {int(second) for second in re.findall(rb'"ts": (\d+)\d{6}', events)}
        lasts_s = max(seconds) - min(seconds) + 1
        events = _later(events, OPENED_NS // 10**9 - _BASE_S - min(seconds))
        self._variants = [_variant(events, delay_us, size, lasts_s) for delay_us in _DELAYS_US]

    def write(self, path: Path, rank: int, ranks: int, skew_ns: int, variant: int) -> int:
        """Write the trace of a rank, and return the size of its JSON."""
        everybody = b"[" + b", ".join(b"%d" % other for other in range(ranks)) + b"]"
        head = re.sub(rb'("baseTimeNanoseconds": )\d+', rb"\g<1>%d" % (_BASE_S * 10**9 + skew_ns), self._head)
        head = re.sub(rb'("rank": )\d+', rb"\g<1>%d" % rank, head)
        head = re.sub(rb'("world_size": )\d+', rb"\g<1>%d" % ranks, head)
        head = re.sub(rb'("ranks": )\[[^]]*\]', rb"\g<1>" + everybody, head)
        body = self._variants[variant]
        path.write_bytes(_packed(head) + body.members + _packed(self._tail))
        return len(head) + body.size + len(self._tail)


def _variant(events: bytes, delay_us: int, size: int, lasts_s: int) -> _Variant:
    events = _with_kernels(_late(events, delay_us))
    turns = max(1, size // len(events))
    texts = [_later(events, turn * lasts_s) for turn in range(turns)]
    body = b",\n".join(texts)
    return _Variant(_packed(body), len(body))


def _late(events: bytes, delay_us: int) -> bytes:
    """Let each all-reduce begin later by `delay_us`, and end at the same time."""

    def later(match: re.Match[bytes]) -> bytes:
        if match[2] != b"gloo:all_reduce" or float(match[4]) <= delay_us:
            return match[0]
        start, dur = float(match[3]) + delay_us, float(match[4]) - delay_us
        return match[0].replace(match[3], b"%.3f" % start).replace(match[4], b"%.3f" % dur)

    return _EVENT.sub(later, events)


def _with_kernels(events: bytes) -> bytes:
    return b",\n".join([events, *map(_kernel, filter(_has_kernel, _EVENT.finditer(events)))])


def _has_kernel(match: re.Match[bytes]) -> bool:
    return match[2] in _PRODUCTS or match[2] == b"gloo:all_reduce"


def _kernel(match: re.Match[bytes]) -> bytes:
    reduces = match[2] == b"gloo:all_reduce"
    name = b"ncclDevKernel_AllReduce_Sum_f32_RING_LL" if reduces else b"ampere_sgemm_128x64_tn"
    return (
        b'  {\n    "ph": "X", "cat": "kernel", "name": "%b", "pid": 0, "tid": %d,\n'
        b'    "ts": %b, "dur": %b,\n    "args": {"device": 0, "stream": %d}\n  }'
        % (name, 13 if reduces else 7, match[3], match[4], 13 if reduces else 7)
    )


def _packed(data: bytes) -> bytes:
    packer = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31)
    return bytes(packer.compress(data) + packer.flush())


def build(root: Path, ranks: Ranks, count: int, seed: int = 1) -> ScaledStep:
    """Write a step of `count` ranks on nodes of 8, with a rollout replica on each node."""
    chance = random.Random(seed)
    folder = StepFolder(root)
    owner = folder.process("trainer", owner=True, host="node-0000")
    unusual = chance.sample(range(1, count), max(4, count // 64))
    missing, broken = set(unusual[::4]), set(unusual[1::4])
    stragglers = set(unusual[2::4])
    update = owner.span("update", 6_000 * MS, 9_800 * MS)
    json_bytes = 0
    for node in range(-(-count // ON_A_NODE)):
        skew_ns = 0 if node == 0 else chance.randrange(-20 * MS, 20 * MS)
        replica = folder.process(
            "rollout", node, host=f"node-{node:04}", pid=900_000 + node, skew_ns=skew_ns, replica=node
        )
        _measure(owner, replica, chance)
        for rank in range(node * ON_A_NODE, min(count, (node + 1) * ON_A_NODE)):
            variant = len(_DELAYS_US) - 1 if rank in stragglers else chance.randrange(len(_DELAYS_US) - 1)
            if rank in missing:
                owner.absent.append(
                    Absent(name=f"actor {rank}", state="missing", reason="its process has ended")
                )
                continue
            actor = folder.process("actor", rank, host=f"node-{node:04}", pid=10_000 + rank, skew_ns=skew_ns)
            _measure(owner, actor, chance)
            _train(owner, actor, update, _DELAYS_US[variant])
            path = folder.layout.traces / "actor" / f"update_actor_rank{rank}-of-{count}.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            json_bytes += ranks.write(path, rank, count, skew_ns, variant)
            if rank in broken:
                os.truncate(path, path.stat().st_size * chance.randrange(20, 90) // 100)
            describe(folder, path, rank, actor.info.host, actor.info.pid, actor.info.key)
    _roll_out(folder, owner, 2 * count, chance)
    for process in folder.processes:
        process.close(10_000 * MS)
    path = folder.write()
    disk_bytes = sum(file.stat().st_size for file in folder.layout.traces.rglob("*.json.gz"))
    return ScaledStep(path, count - len(missing), json_bytes, disk_bytes, len(missing), len(broken))


def _measure(owner: FakeProcess, process: FakeProcess, chance: random.Random) -> None:
    if process.info.host != owner.info.host:
        for at_ns in (0, 10_000 * MS):
            owner.measures(process, at_ns, 300_000, chance.randrange(-200_000, 200_000))


def _train(owner: FakeProcess, actor: FakeProcess, update: int, delay_us: int) -> None:
    actor.profiled = True
    end_ns = 9_700 * MS + delay_us * 20_000
    above = actor.span("update_actor", 6_000 * MS, end_ns, link=owner.link(update))
    for batch in range(4):
        start_ns = (6_000 + 900 * batch) * MS
        actor.span("forward_backward", start_ns, start_ns + 800 * MS, parent=above)
        actor.span("optimizer", start_ns + 800 * MS, start_ns + 890 * MS, parent=above)
    for name in ("cpu", "memory"):
        actor.counter(name, {at_s * 1000 * MS: float(at_s % 3 + delay_us % 7) for at_s in range(10)})


def _roll_out(folder: StepFolder, owner: FakeProcess, trajectories: int, chance: random.Random) -> None:
    replicas = [process for process in folder.processes if process.info.role == "rollout"]
    roll = owner.span("rollout", 0, 6_000 * MS, role="agent_loop")
    for number in range(trajectories):
        start_ns = chance.randrange(0, 200) * MS
        end_ns = start_ns + int(min(5_700, 500 + chance.expovariate(1 / 800))) * MS
        name, replica = f"problem{number}", replicas[number % len(replicas)]
        above = owner.span("trajectory", start_ns, end_ns, role="agent_loop", parent=roll, trajectory=name)
        turn = owner.span("turn", start_ns, end_ns, role="agent_loop", parent=above, trajectory=name, turn=0)
        replica.span("generate", start_ns, end_ns, link=owner.link(turn), trajectory=name, turn=0)


def record(steps: int) -> bytes:
    """Run two processes that train, and return the torch trace of the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, str(steps)]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        assert not any(process.wait() for process in others)
        return (Path(folder) / "trace.json").read_bytes()


def _main(folder: Path, steps: int, rank: int) -> None:
    import time

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            model(torch.randn(16, 64)).pow(2).mean().backward()
            if rank == 1:
                time.sleep(_LATE_US / 1e6)
            gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
            dist.all_reduce(torch.cat(gradients))
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        profiler.export_chrome_trace(str(folder / "trace.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
