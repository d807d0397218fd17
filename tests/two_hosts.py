"""Two hosts on one machine, which share no folder: a Ray node in namespaces of its own each (network, mounts,
host name), and a real vLLM on the second. On request, as root on Linux: `python3 dev.py test --two-hosts`."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import Manifest, ProcessPart
from stepscope.files.requests import Listening, read_listening
from stepscope.files.sidecar import Sidecar
from tools.engine_environments import newest

PORT = 6399
PROGRAM = """
import os, sys, time
import ray
from stepscope import capture, configure, profile_step
from stepscope.engines.ray import RayRollout
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

class Learner:
    def __init__(self, computes):
        if computes:
            import torch
            self.compute = lambda: torch.ones(4) + 1
        else:
            self.compute = lambda: time.sleep(0.01)

    @profile_step(role="actor")
    def update(self):
        self.compute()

class Server:
    @profile_step(role="rollout")
    async def generate(self):
        pass

def fake(engine, replica):
    return FakeEngineProfiler(FakeEngine(workers=1), replica)

def on(kind, host, *args):
    return ray.remote(kind).options(num_cpus=0, resources={host: 0.01}).remote(*args)

save_path, gather, stop, address = sys.argv[1:]
config = configure(
    save_path=save_path, control={"poll_seconds": 0.1}, torch={"activities": ["cpu"]},
    finish={"gather": gather == "gather"},
    budget={"fanout_seconds": 60, "keep_steps": 1},
    recorder={"triggers": []},  # it would write slow steps beside the one that is asked for
)
ray.init(address=address, log_to_driver=False)
learners = [on(Learner, host, gather == "leave") for host in ("host-a", "host-b")]
server = on(Server, "host-b")
engines = [RayRollout(server, fake)]
step = 0
while not os.path.exists(stop):
    with capture(step, workers={"actor": learners, "rollout": server}, engines=engines) as cap:
        ray.get([learner.update.remote() for learner in learners])
    step += 1
ray.shutdown()
"""
VLLM = """
import sys
import ray
from stepscope import capture, configure
from stepscope_report.demo.model import Transformer
from stepscope.engines.ray import RayRollout
from stepscope_vllm._demo import VllmReplica

save_path, address, python = sys.argv[1:]
config = configure(
    save_path=save_path, steps="1:3", roles={"rollout": {"ranks": "all"}}, torch={"activities": ["cpu"]},
    budget={"fanout_seconds": 120},
)
ray.init(address=address, log_to_driver=False)
there = {"resources": {"host-b": 0.01}, "runtime_env": {"py_executable": python}}
replica = ray.remote(VllmReplica).options(num_cpus=0, **there).remote(0, config, 0)
ray.get(replica.load_weights.remote(Transformer().state_dict()))
for step in (1, 2):
    with capture(step, engines=[RayRollout(replica, "vllm")], config=config) as cap:
        ray.get([replica.generate.remote([1, 2, 3], f"{step}-{number}", None) for number in range(3)])
    cap.result.wait(120)
ray.get(replica.shut_down.remote())
ray.shutdown()
"""


def must(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """Processes that see one network, one set of mounts and one host name."""

    def __init__(self, name: str, address: str, run: Path) -> None:
        self.name, self.address = name, address
        self.netns = f"stepscope-{os.getpid()}-{name}"
        must("ip", "netns", "add", self.netns)
        made = f"mount -t tmpfs tmpfs {run} && mount -t tmpfs tmpfs /dev/shm && hostname {name}"
        inside = f"{made} && ip link set lo up && echo ready && exec sleep infinity"
        self.first = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, "unshare", "-m", "-u", "sh", "-c", inside],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.first.stdout is not None
        assert self.first.stdout.readline() == "ready\n"
        self.processes: list[subprocess.Popen[str]] = []

    def words(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.first.pid), "-m", "-u", "-n", *command]

    def start(self, log: Path, *command: str, **environ: str) -> subprocess.Popen[str]:
        with log.open("w") as out:
            process = subprocess.Popen(
                self.words(*command),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "RAY_AUTH_MODE": "disabled", **environ},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def say(self, *command: str) -> subprocess.CompletedProcess[str]:
        words = self.words(sys.executable, "-m", "stepscope", *command)
        return subprocess.run(words, capture_output=True, text=True)

    def view(self, path: Path) -> Path:
        """Return a path as this host sees it."""
        return Path(f"/proc/{self.first.pid}/root{path}")

    def end(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        self.first.kill()
        self.first.wait()
        assert self.first.stdout is not None
        self.first.stdout.close()
        subprocess.run(["ip", "netns", "delete", self.netns])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: the paths of Ray's sockets may not exceed 107 characters."""
    made = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))
    (made / "run").mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.fail("this makes namespaces: it needs root, and `ip` (apt install iproute2)")
    made: list[Host] = []
    try:
        for name, address in (("host-a", "10.213.7.1"), ("host-b", "10.213.7.2")):
            made.append(Host(name, address, folder / "run"))
        one, other = made
        link = ("type", "veth", "peer", "name", "eth0", "netns", other.netns)
        must("ip", "-n", one.netns, "link", "add", "eth0", *link)
        for host in made:
            must("ip", "-n", host.netns, "addr", "add", f"{host.address}/24", "dev", "eth0")
            must("ip", "-n", host.netns, "link", "set", "eth0", "up")
            # It leads nowhere; Ray asks which address a host would use for the outside.
            must("ip", "-n", host.netns, "route", "add", "default", "dev", "eth0")
        ray = str(Path(sys.executable).with_name("ray"))
        for host in made:
            head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
            where = head if host is one else [f"--address={one.address}:{PORT}"]
            own = f'{{"{host.name}": 1}}'
            common = [f"--node-ip-address={host.address}", "--num-cpus=4", f"--resources={own}", "--block"]
            log = folder / f"{host.name}.log"
            for left in (2, 1, 0):  # on a busy machine Ray gives a node up after 30 s
                process = host.start(log, ray, "start", *where, *common)
                wait_for(partial(says_or_ends, log, "Ray runtime started", process), log)
                if process.poll() is None:
                    break
                assert left, log.read_text()
        yield one, other
    finally:
        for host in reversed(made):
            host.end()


def says_or_ends(log: Path, words: str, process: subprocess.Popen[str]) -> bool:
    return words in log.read_text() or process.poll() is not None


def wait_for(condition: Callable[[], bool], log: Path | None = None, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come" if log is None else log.read_text()
        time.sleep(0.1)


_numbers = itertools.count(1)


@pytest.fixture
def train(folder: Path, hosts: tuple[Host, Host]) -> Iterator[Callable[..., Path]]:
    """Start the program on the first host and return the folder of its run there."""
    stops: list[tuple[Path, subprocess.Popen[str]]] = []

    def start(gather: str = "gather") -> Path:
        number = next(_numbers)
        program, stop, save_path = folder / "program.py", folder / f"stop{number}", folder / f"run/{number}"
        program.write_text(PROGRAM)
        words = (
            sys.executable,
            str(program),
            str(save_path),
            gather,
            str(stop),
            f"{hosts[0].address}:{PORT}",
        )
        log = folder / f"program{number}.log"
        stops.append((stop, hosts[0].start(log, *words, STEPSCOPE_RAISE="0")))
        wait_for(lambda: steps_of(hosts[0], save_path) >= 2, log)
        return save_path

    yield start
    for stop, process in stops:
        stop.touch()
        assert process.wait(180) == 0, (folder / f"program{stop.name[4:]}.log").read_text()


def steps_of(host: Host, save_path: Path) -> int:
    """Return the latest step of a host's loop. Create its folder, which listeners wait for."""
    listeners: list[Listening] = read_listening(RunLayout(host.view(save_path)))
    if not listeners:
        host.view(save_path).mkdir(parents=True, exist_ok=True)
        return 0
    return listeners[0].step or 0


def captured(host: Host, save_path: Path) -> Manifest | None:
    """Return the newest manifest in which nothing is on its way."""
    for layout in reversed(RunLayout(host.view(save_path)).steps().values()):
        if layout.manifest.exists():
            manifest = msgspec.json.decode(layout.manifest.read_bytes(), type=Manifest)
            owner = manifest.processes[0]
            if owner.closed is not None and not [
                item
                for part in manifest.processes
                for item in part.expected
                if item.pending is not None or item.state == "missing"
            ]:
                return manifest
    return None


def test_a_request_on_one_host_captures_both_and_the_files_of_the_other_come_home(
    hosts: tuple[Host, Host], train: Callable[..., Path]
) -> None:
    one, other = hosts
    save_path = train()
    asked = one.say("trigger", str(save_path), "--roles", "rollout", "--ranks", "all", "--wait", "60")
    assert asked.returncode == 0, asked.stderr
    wait_for(lambda: captured(one, save_path) is not None)
    manifest = captured(one, save_path)
    assert manifest is not None
    assert not manifest.problems()
    assert sorted((part.process.host, part.process.role) for part in manifest.processes) == [
        ("host-a", "actor"), ("host-a", "trainer"), ("host-b", "actor"), ("host-b", "rollout"),
    ]  # fmt: skip
    (replica,) = (item for item in manifest.processes[0].expected if item.name == "replica 0")
    assert [artifact.host for artifact in replica.artifacts] == ["host-b"]
    step = RunLayout(one.view(save_path)).step(manifest.step)
    assert all((step.root / artifact.path).exists() for artifact in replica.artifacts)
    assert sorted(path.name.split("_")[2] for path in step.spans.iterdir()) == [
        "host-a", "host-a", "host-b", "host-b",
    ]  # fmt: skip
    assert not (other.view(save_path) / "control.json").exists()
    status = json.loads(one.say("trigger", "list", str(save_path), "--json").stdout)
    (answer,) = (answer for listener in status["listening"] for answer in listener["answers"].values())
    assert sorted(answer["others"].values()) == ["began"] * 4
    report = one.say("report", str(save_path), "--json")
    assert report.returncode == 0, report.stderr
    (report_of_step,) = json.loads(report.stdout)["steps"]
    assert {row["host"] for row in report_of_step["health"]["processes"]} == {"host-a", "host-b"}
    assert report_of_step["health"]["complete"]


def test_traces_of_vllm_in_an_actor_on_the_other_host_come_home_to_their_steps(
    folder: Path, hosts: tuple[Host, Host]
) -> None:
    one, _ = hosts
    program, save_path, log = folder / "engine.py", folder / "run" / "engine", folder / "engine.log"
    program.write_text(VLLM)
    words = (str(program), str(save_path), f"{one.address}:{PORT}", newest("vllm").python)
    assert one.start(log, sys.executable, *words, STEPSCOPE_RAISE="0").wait(500) == 0, log.read_text()
    for step in (1, 2):
        layout = RunLayout(one.view(save_path)).step(step)
        manifest = msgspec.json.decode(layout.manifest.read_bytes(), type=Manifest)
        assert not manifest.problems()
        passes, sidecar = sorted(layout.sidecars(), key=lambda path: ".trace." in path.name)
        assert "passes" in passes.name
        description = msgspec.json.decode(sidecar.read_bytes(), type=Sidecar)
        assert (description.step, description.artifact.host, description.artifact.rank) == (step, "host-b", 0)
        trace = json.loads(gzip.decompress((layout.root / description.artifact.path).read_bytes()))
        assert trace["host_name"] == "host-b"
        assert sum(event["name"].startswith("execute_") for event in trace["traceEvents"]) >= 2


def test_traces_that_stay_on_their_hosts_are_read_there(
    folder: Path, hosts: tuple[Host, Host], train: Callable[..., Path]
) -> None:
    one, other = hosts
    save_path = train(gather="leave")
    asked = one.say("trigger", str(save_path), "--roles", "actor", "--ranks", "all", "--wait", "60")
    assert asked.returncode == 0, asked.stderr

    wait_for(lambda: bool(RunLayout(one.view(save_path)).steps()))
    (step,) = RunLayout(one.view(save_path)).steps()
    wait_for(lambda: all(written(RunLayout(host.view(save_path)).step(step)) for host in hosts))
    here = RunLayout(one.view(save_path)).step(step)
    far = RunLayout(other.view(save_path)).step(step)
    path, nodes = str(RunLayout(save_path).step(step).root), f"{one.address}:{PORT}"
    (trace,) = far.traces.rglob("*.gz")
    left = {trace.name}
    with_blanks(trace, 400)  # a small one would be fetched
    (folder / f"stop{save_path.name}").touch()
    assert one.processes[-1].wait(120) == 0

    report = one.say("report", path, "--json", "--ray", nodes)
    (read,) = json.loads(report.stdout)["steps"]
    assert {row["host"] for row in read["health"]["processes"]} == {"host-a", "host-b"}, report.stderr
    assert left <= {Path(row["file"]).name for row in read["traces"]["traces"]}
    assert not left & {trace.name for trace in here.traces.rglob("*.gz")}
    merged = one.say("merge", path, "--ray", nodes, "--json")
    files = {Path(file["file"]).name: file["events"] for file in json.loads(merged.stdout)["files"]}
    assert left <= set(files)
    assert all(files.values()), merged.stdout
    (fetched,) = here.traces.rglob(trace.name)
    assert fetched.read_bytes() == trace.read_bytes()
    fetched.unlink()

    with_blanks(trace, 4000)  # long to read: the node is killed meanwhile
    reading = subprocess.Popen(
        one.words(sys.executable, "-m", "stepscope", "report", path, "--json", "--ray", nodes),
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(partial(reads_on, other, trace.name))
    lose(other)
    answer, _ = reading.communicate(timeout=120)
    assert reading.returncode == 3
    (read,) = json.loads(answer)["steps"]
    problems = {Path(row["file"]).name: row["what"] for row in read["traces"]["problems"]}
    died = "the Ray node host-b: |Ray nodes that have it died: host-b"
    assert re.search(died, problems[trace.name])
    assert not any("host-a" in name for name in problems)


def with_blanks(trace: Path, megabytes: int) -> None:
    """Write blanks at the end of a trace, which take as long to read as events."""
    text = gzip.decompress(trace.read_bytes()).replace(b" " * 1024, b"").rstrip()
    blanks = gzip.compress(b" " * (1 << 20), 1)
    trace.write_bytes(gzip.compress(text[:-1]) + blanks * megabytes + gzip.compress(text[-1:]))


def written(step: StepLayout) -> bool:
    """Return whether the processes of a host have left their traces."""
    parts = [
        msgspec.json.decode(path.read_bytes(), type=ProcessPart) for path in step.processes.glob("*.json")
    ]
    own = [item for part in parts if not part.owner for item in part.expected]
    return len(parts) > 1 and not any(item.pending for item in own) and any(step.traces.rglob("*.gz"))


def pids_on(host: Host) -> list[int]:
    """Return the processes in a host's network."""
    own, pids = os.stat(f"/proc/{host.first.pid}/ns/net").st_ino, []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.stat(process / "ns/net").st_ino == own:
                pids.append(int(process.name))
    return pids


def reads_on(host: Host, name: str) -> bool:
    """Return whether a process on this host has the file of that name open."""
    for pid in pids_on(host):
        with suppress(OSError):
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(opened).endswith(f"/{name}"):
                        return True
    return False


def lose(host: Host) -> None:
    """End everything on a host but its namespaces."""
    for pid in pids_on(host):
        if pid != host.first.pid:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
