"""Hangs of real processes, each with the culprit that was planted in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

HEAD = """
import asyncio, os, queue, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from stepscope import capture, configure, prepare, profile_step, span, trajectory, turn

if __name__ == "__main__":
    configure(save_path=sys.argv[1], steps=[], record="spans", control={"poll_seconds": 0.1})

rank = int(os.environ.get("RANK", "0"))

def ready():
    print("ready", flush=True)

"""
RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=4)

def load_batch():
    time.sleep(1000)

@profile_step("actor")
def update():
    if rank == 2:
        load_batch()
    dist.all_reduce(torch.ones(2))

with capture(3, role="actor"):
    dist.barrier()
    ready()
    update()
"""
BETWEEN = RANKS.replace("    ready()\n", "    ready()\n    if rank == 2: load_batch()\n")
SKIPPED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=4)

@profile_step("actor")
def update():
    dist.all_reduce(torch.ones(2))

@profile_step("actor")
def save():
    dist.broadcast(torch.ones(2), src=0)
    dist.all_reduce(torch.ones(2))

with capture(3, role="actor"):
    dist.barrier()
    ready()
    if rank != 1:
        update()
    save()
"""
STOPPED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=4)

@profile_step("actor")
def update():
    if rank == 1:
        os.kill(os.getpid(), 19)
    dist.all_reduce(torch.ones(2))

with capture(3, role="actor"):
    dist.barrier()
    ready()
    update()
"""
TOOL = """
async def search():
    async with span("search", role="env"):
        await asyncio.Event().wait()

async def agent(number):
    async with trajectory(f"t-{number}"), turn(0):
        if number == 2:
            await search()
        async with span("generate", role="rollout"):
            await asyncio.sleep(0.01)

async def main():
    async with capture(3), span("rollout", role="rollout"):
        tasks = [asyncio.create_task(agent(number)) for number in range(4)]
        await asyncio.sleep(0.2)
        ready()
        await asyncio.gather(*tasks)

asyncio.run(main())
"""
COMMAND = """
@profile_step("env")
def run_tests():
    subprocess.run(["sleep", "1000"])

with capture(3), span("rollout", role="trainer"), ThreadPoolExecutor(2) as pool:
    future = pool.submit(run_tests)
    ready()
    with span("collect", role="trainer"):
        future.result()
"""
BLOCKED = """
def score():
    time.sleep(1000)

async def reward():
    async with span("score", role="reward"):
        await asyncio.sleep(0.2)
        score()

async def generate():
    async with span("generate", role="rollout"):
        await asyncio.sleep(0.5)

async def main():
    async with capture(3):
        ready()
        await asyncio.gather(reward(), *(generate() for _ in range(9)))

asyncio.run(main())
"""
CALLBACK = """
def export():
    time.sleep(1000)

async def generate():
    async with span("generate", role="rollout"):
        await asyncio.sleep(0.5)

async def main():
    async with capture(3):
        ready()
        asyncio.get_running_loop().call_later(0.1, export)
        await asyncio.gather(*(generate() for _ in range(9)))

asyncio.run(main())
"""
LOCKS = """
first, second = threading.Lock(), threading.Lock()

@profile_step("actor")
def update(mine, other):
    with mine:
        time.sleep(0.3)
        with other:
            pass

with capture(3):
    threads = [threading.Thread(target=update, args=pair) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    ready()
    with span("join", role="trainer"):
        for thread in threads:
            thread.join()
"""
FULL_QUEUE = """
batches = queue.Queue(1)

def train():
    time.sleep(1000)

@profile_step("actor")
def update():
    batches.get()
    train()

@profile_step("rollout")
def push():
    for number in range(9):
        batches.put(number)

with capture(3):
    threading.Thread(target=update, daemon=True).start()
    ready()
    push()
"""
GATHER = """
async def search():
    async with span("search", role="env"):
        await asyncio.Event().wait()

async def idle():
    async with span("watch", role="trainer"):
        await asyncio.sleep(1000)

async def main():
    async with capture(3):
        watch = asyncio.create_task(idle())
        tasks = [asyncio.create_task(search()), asyncio.create_task(asyncio.sleep(0))]
        await asyncio.sleep(0.2)
        ready()
        async with span("collect", role="rollout"):
            await asyncio.WAIT

asyncio.run(main())
"""
ENGINE = """
import http.server, urllib.request

class Engine(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        threading.Event().wait()

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()

@profile_step("rollout")
def generate():
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", data=b"{}")

@profile_step("trainer")
def wait_for_rollouts(future):
    future.result()

with capture(3), ThreadPoolExecutor(1) as pool:
    future = pool.submit(generate)
    ready()
    wait_for_rollouts(future)
"""
LAUNCHER = """
TRAINER = '''
import sys, time
from stepscope import capture, configure, profile_step
configure(save_path=sys.argv[1], steps=[], record="spans", control={"poll_seconds": 0.1})
@profile_step("actor")
def load_checkpoint():
    time.sleep(1000)
with capture(3, role="actor"):
    print("ready", flush=True)
    load_checkpoint()
'''
with capture(3), span("run", role="launcher"):
    time.sleep(0.5)
    subprocess.run([sys.executable, "-c", TRAINER, sys.argv[1]])
"""
START_RAY = """
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
"""
RAY = (
    START_RAY
    + """
@ray.remote(num_cpus=0)
class Worker:
    @profile_step(role="actor")
    def update(self, n):
        time.sleep(1000 if n == 1 else 0.02)

actors = [Worker.remote() for _ in range(2)]
prepare(workers={"actor": actors})
"""
)
RAY_GET = (
    RAY
    + """
with capture(1, workers={"actor": actors}):
    ray.get([a.update.remote(0) for a in actors])
with capture(2, workers={"actor": actors}), span("update_all", role="trainer"):
    refs = [a.update.remote(n) for n, a in enumerate(actors)]
    ready()
    WAIT
"""
)
RAY_AWAIT = (
    RAY.replace("def update", "async def update").replace("time.sleep", "await asyncio.sleep")
    + """
async def main():
    async with capture(1, workers={"actor": actors}):
        await asyncio.gather(*(a.update.remote(0) for a in actors))
    async with capture(2, workers={"actor": actors}), span("rollout", role="trainer"):
        refs = [a.update.remote(n) for n, a in enumerate(actors)]
        ready()
        for ref in refs:
            await ref

asyncio.run(main())
"""
)
DEAD = (
    START_RAY
    + """
from ray.util.queue import Queue

@ray.remote(num_cpus=0)
class Rollout:
    @profile_step(role="actor")
    def warm_up(self):
        return os.getpid()

actors = [Rollout.remote() for _ in range(2)]
batches = Queue()
prepare(workers={"actor": actors})
with capture(1, workers={"actor": actors}):
    pids = ray.get([a.warm_up.remote() for a in actors])
with capture(2, workers={"actor": actors}), span("next_batch", role="trainer"):
    time.sleep(3)  # until both record
    os.kill(pids[1], 9)
    time.sleep(1)
    ready()
    batches.get()
"""
)


class Hang(NamedTuple):
    """A program that hangs, and what `why` has to say of it."""

    name: str
    program: str
    process: str
    """Begin of the process' name."""
    call: str
    """Role and stage, or empty if it is in no call."""
    where: str
    """Text of the place, or what is said of the process."""
    first: str = "Waits for no other call"
    """Words of the first line: the kind of hang."""
    ranks: int = 1
    needs: str = ""
    environment: Mapping[str, str] = MappingProxyType({})


def _on_uvloop(name: str, program: str, call: str, where: str, first: str) -> Hang:
    program = "import uvloop\n" + program.replace("asyncio.run(", "uvloop.run(")
    return Hang(f"{name}, uvloop", program, "trainer_", call, where, first, needs="uvloop")


def _gather(how: str) -> Hang:
    program = GATHER.replace("asyncio.WAIT", f"asyncio.{how}")
    return Hang(f"tasks awaited by {how.split('(')[0]}", program, "trainer_", "env search", "search at ")


HANGS = [
    Hang("late rank", RANKS, "actor_rank2_", "actor update", "load_batch at ", ranks=4, needs="torch"),
    Hang(
        "late rank, torch's recorder off", RANKS, "actor_rank2_", "actor update", "load_batch at ", ranks=4,
        needs="torch", environment={"TORCH_FR_BUFFER_SIZE": "0"},
    ),
    Hang(
        "rank that skips a collective", SKIPPED, "actor_rank1_", "actor save", "save at ",
        "wait for each other", 4, "torch",
    ),
    Hang("rank that is stopped", STOPPED, "actor rank 1", "", "no answer", "Others wait for", 4, "torch"),
    Hang(
        "late rank in no call", BETWEEN, "actor_rank2_", "", "load_batch at ", "Others wait for", 4, "torch",
    ),
    Hang("tool that never returns", TOOL, "trainer_", "env search", "search at "),
    Hang("command that never ends", COMMAND, "trainer_", "env run_tests", "run_tests at "),
    Hang(
        "blocked event loop", BLOCKED, "trainer_", "reward score", "score at ",
        "Blocks its event loop",
    ),
    Hang(
        "event loop blocked by a callback", CALLBACK, "trainer_", "", "export at ",
        "Blocks its event loop",
    ),
    _on_uvloop("tool that never returns", TOOL, "env search", "search at ", "Waits for no other call"),
    _on_uvloop("blocked event loop", BLOCKED, "reward score", "score at ", "Blocks its event loop"),
    Hang("deadlocked locks", LOCKS, "trainer_", "actor update", "update at "),
    Hang("full queue", FULL_QUEUE, "trainer_", "actor update", "train at "),
    _gather("gather(*tasks)"),
    _gather("wait(tasks)"),
    _gather("wait_for(asyncio.gather(*tasks), 1000)"),
    _gather("shield(tasks[0])"),
    Hang("engine that does not answer", ENGINE, "trainer_", "rollout generate", "generate at "),
    Hang("launcher of a training", LAUNCHER, "actor_", "actor load_checkpoint", "load_checkpoint at "),
    Hang(
        "ray.get", RAY_GET.replace("WAIT", "ray.get(refs)"), "actor_rank1_", "actor update", "update at ",
        needs="ray",
    ),
    Hang(
        "ray.wait", RAY_GET.replace("WAIT", "ray.wait(refs, num_returns=2)"), "actor_rank1_",
        "actor update", "update at ", needs="ray",
    ),
    Hang("await of a Ray call", RAY_AWAIT, "actor_rank1_", "actor update", "update at ", needs="ray"),
    Hang("dead actor", DEAD, "actor_rank1_", "", "its process has ended", "Died", needs="ray"),
]  # fmt: skip


@contextmanager
def hanging(hang: Hang, folder: Path, ending: signal.Signals | None = None) -> Iterator[None]:
    """Run the program of a hang. The block runs once each of its processes hangs.

    Args:
        ending: Ends its processes, but those of Ray; all of them are killed without.
    """
    program = folder.with_suffix(".py")
    program.write_text(HEAD + hang.program)
    environment = {**os.environ, "STEPSCOPE_RUN_ID": "feed0005", "RAY_ADDRESS": "local", **hang.environment}
    folder.mkdir(exist_ok=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment | ({"RANK": str(rank), "WORLD_SIZE": str(hang.ranks)} if hang.ranks > 1 else {}),
        )
        for rank in range(hang.ranks)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if "ready\n" not in process.stdout:
                raise AssertionError(process.communicate()[1][-3000:])
        time.sleep(1.5)  # until the call after that line is reached
        yield
        if ending is not None:
            for process in started:
                process.send_signal(ending)
            for process in started:
                process.communicate(timeout=30)
    finally:
        for process in started if ending is None else ():
            os.killpg(process.pid, signal.SIGTERM if hang.needs == "ray" else signal.SIGKILL)
        for process in started:
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


class Answer(NamedTuple):
    """An answer of `why` to a hang."""

    kind: bool
    """True if the first line tells the kind."""
    process: bool
    call: bool
    """True if it names the call and its place."""
    took_s: float
    line: str

    @property
    def is_right(self) -> bool:
        return self.kind and self.process and self.call


def ask(hang: Hang, folder: Path) -> Answer:
    """Ask the command about a hang, and compare its first line with what was planted."""
    began = time.monotonic()
    why = [sys.executable, "-m", "stepscope", "why", str(folder)]
    environment = {**os.environ, "COLUMNS": "2000"}
    text = subprocess.run(why, capture_output=True, text=True, check=False, env=environment).stdout
    took_s = time.monotonic() - began
    line = [*text.splitlines(), "", ""][1]
    _, _, rest = line.partition(hang.first)
    named = re.match(rf"(:)? ?{hang.process}[^:]*: (.*)", rest)
    return Answer(
        kind=bool(rest),
        process=named is not None,
        call=named is not None and named[2].startswith(hang.call) and hang.where in named[2].split(";")[0],
        took_s=took_s,
        line=line,
    )
