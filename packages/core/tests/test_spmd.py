"""Captures that each rank of a program opens by itself, under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from packages.core.tests.runs import ranks, until
from packages.report.tests.commands import Command
from stepscope._recording.process.manifest_part import ManifestPart, find_peers
from stepscope.files.layout import RunLayout
from stepscope.files.manifest_parts import read_parts
from stepscope.files.requests import has_died, read_listening, write_listening
from stepscope_report.cli import run
from stepscope_report.sections.health import Health, step_health
from stepscope_report.timeline import load_step

MAIN = Path(__file__).with_name("spmd_main.py")


@pytest.mark.needs("torch")
def test_one_rank_tells_of_a_step_and_it_is_one_that_closed_last(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(MAIN), str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    told = [line for line in done.stderr.splitlines() if "stepscope: step" in line]
    in_turn, at_once = told
    assert in_turn.startswith("rank 2: ")
    assert "3 processes, 3 traces" in in_turn
    assert "step 2 captured: 3 processes" in at_once
    assert run(["ls", str(tmp_path)]) == 0
    for step in (1, 2):  # nobody waits for the files of the second
        manifest = json.loads((tmp_path / f"step_00000{step}" / "manifest.json").read_text())
        assert (manifest["state"], len(manifest["processes"])) == ("ok", 3)


LOOP = """
import os, signal, sys, time
from pathlib import Path
import logging
import stepscope
from stepscope.files.storage import is_running
logging.basicConfig(level=logging.INFO)

folder, selected, end, where, dying, others = sys.argv[1:]
rank, pids = int(os.environ["RANK"]), Path(folder, "pids")
pids.mkdir(parents=True, exist_ok=True)
dying = [int(number) for number in dying.split()]
is_victim = rank in dying
config = stepscope.ProfileConfig.from_mapping({
    "save_path": folder, "steps": [int(step) for step in selected.split()],
    "roles": {"*": {"profiler": "off"}}, "control": {"poll_seconds": 0.05},
})

def await_all(step, number):
    (pids / f"{step}_{os.getpid()}").touch()
    while len(list(pids.glob(f"{step}_*"))) < number:
        time.sleep(0.01)

def die():
    await_all("last", len(dying))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exit":
        os._exit(0)
    raise ValueError("a rank")

def work(step):
    while not list(Path(folder, "control").glob(f"*_pid{os.getpid()}.json")):
        time.sleep(0.01)
    if is_victim and step == 3 and where == "in":
        die()
    if step == 3 and not is_victim:
        await_all("alive", int(os.environ["WORLD_SIZE"]) - len(dying) - (others == "silent"))
        while len(list(pids.glob("last_*"))) < len(dying) or any(
            is_running(int(path.name.rpartition("_")[2])) for path in pids.glob("last_*")
        ):
            time.sleep(0.01)
        if others == "wait":
            time.sleep(60)
        raise RuntimeError("Connection closed by peer")

if others == "silent" and rank == 1:
    sys.exit()
for step in range(4):
    if is_victim and step == 3 and where == "before":
        die()
    with stepscope.capture(step, config=config):
        work(step)
"""


def health_of(folder: Path, step: int = 3) -> Health:
    return step_health(load_step(RunLayout(folder).step(step).root))


def loop(folder: Path, world: int, selected: str, end: str, where: str, dying: str, others: str = "") -> str:
    """Run the loop in ranks of which some die in or before step 3, after which the others raise. Return what
    they log.
    """
    with ranks(world, LOOP, folder, selected, end, where, dying, others) as programs:
        return "".join(program.communicate(timeout=60)[1] for program in programs)


@pytest.mark.slow
@pytest.mark.parametrize("selected", ["", "3"], ids=["in memory", "selected"])
@pytest.mark.parametrize(
    ("world", "end", "where", "dying"),
    [
        (2, "kill", "in", "1"),
        (2, "exit", "in", "0"),
        (2, "kill", "before", "1"),
        (2, "raise", "before", "1"),
        (4, "kill", "in", "0 2"),
    ],
)
def test_a_rank_that_died_is_named_first(
    tmp_path: Path, world: int, selected: str, end: str, where: str, dying: str
) -> None:
    loop(tmp_path, world, selected, end, where, dying)
    health = health_of(tmp_path)
    rows = [row.name for row in health.processes if row.died]
    assert sorted([*health.lost, *rows]) == [f"trainer {rank}" for rank in dying.split()]
    assert health.state == "missing"
    if not selected:  # the ranks ended step 2, and died with what they kept of it
        before = health_of(tmp_path, 2)
        assert before.lost == ()
        assert before.absent == tuple(f"trainer {rank}" for rank in dying.split())
    assert run(["ls", str(tmp_path)]) == 3


@pytest.mark.slow
def test_why_and_watch_name_a_rank_that_died_while_others_wait(tmp_path: Path, command: Command) -> None:
    with ranks(2, LOOP, tmp_path, "", "kill", "in", "1", "wait"):
        until(lambda: any(has_died(one) and one.rank == 1 for one in read_listening(RunLayout(tmp_path))))
        answer = command("why", tmp_path, "--json", code=3).json
        assert answer["calls"][answer["culprits"][0]]["process"].startswith("trainer_rank1_")
        until(lambda: list(tmp_path.glob("steps_*.jsonl")))
        assert command("watch", tmp_path, "--json").json["dead"] == ["trainer 1"]


@pytest.mark.slow
@pytest.mark.parametrize(("selected", "told"), [("", "step 3 is on record"), ("3", "step 3 captured")])
def test_a_resumed_run_tells_of_a_step_again(tmp_path: Path, selected: str, told: str) -> None:
    for _ in range(2):
        assert loop(tmp_path, 3, selected, "kill", "in", "1").count(told) == 1
        shutil.rmtree(tmp_path / "pids")


@pytest.mark.slow
def test_ranks_that_nobody_expects_are_not_missing(tmp_path: Path) -> None:
    loop(tmp_path / "silent", 3, "", "kill", "in", "", "silent")
    assert [process.name for process in health_of(tmp_path / "silent").processes] == [
        "trainer 0",
        "trainer 2",
    ]
    assert health_of(tmp_path / "silent").complete


@pytest.mark.slow
def test_a_rank_of_another_host_that_left_nothing_is_missing(tmp_path: Path) -> None:
    """A host that died as a whole leaves no word of its ranks but that they listened."""
    loop(tmp_path, 2, "", "kill", "in", "1")
    layout = RunLayout(tmp_path)
    (step,) = [layout.step(3)]
    (survivor,), _ = read_parts(step)
    known = {one.rank: one for one in read_listening(layout)}
    for file in layout.listener_files():
        file.unlink()
    write_listening(layout, msgspec.structs.replace(known[0], ended_ns=None))
    elsewhere = msgspec.structs.replace(known[1], host="elsewhere")
    other_selection = msgspec.structs.replace(known[1], host="apart", selects="7 spans")
    earlier = msgspec.structs.replace(known[1], host="before", since_ns=known[0].imported_ns - 10**12)
    for listening, absent in ((elsewhere, ("trainer 1",)), (other_selection, ()), (earlier, ())):
        write_listening(layout, listening)
        part = ManifestPart(step.part_of(survivor.process, survivor.run_id), survivor)
        part.add_peers(find_peers(layout, survivor.process, survivor.run_id, all_hosts=True))
        part.write()
        health = health_of(tmp_path)
        assert (health.lost, health.absent) == ((), absent)
        layout.listener(listening.host, listening.pid).unlink()
