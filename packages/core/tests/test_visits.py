"""Processes that no capture knows, a pool's children and a tool server, record their work for a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope._recording.recorder.visits import ROLE
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest import ProcessPart
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.spans import Line, Span

POOL = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from stepscope import attach, capture, carrier, configure, profile_step, span

def set_up(**more):
    configure(save_path=sys.argv[1], steps="1:3", roles={"*": {"profiler": "off"}}, **more)

@profile_step(role="reward")
def score(sample, place):
    with attach(place), span("verify", role="reward", attrs={"sample": sample}):
        time.sleep(0.01)

def score_all(pool, steps):
    for step in steps:
        with capture(step), span("rewards"):
            place = carrier()
            list(pool.map(score, range(6), [place] * 6))

if __name__ == "__main__":
    set_up()
    method = sys.argv[2]
    with ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context(method), initializer=set_up if method == "spawn" else None
    ) as pool:
        score_all(pool, range(4))
"""
SERVER = """
import subprocess, sys
from stepscope import attach, capture, carrier, configure, span

def answer(line):
    with attach(eval(line)), span("search", role="env"):
        print("done", flush=True)

if sys.argv[2:] == ["server"]:
    configure(save_path=sys.argv[1], steps="every:1")
    for line in sys.stdin:
        answer(line)
else:
    server = subprocess.Popen([sys.executable, *sys.argv, "server"], stdin=-1, stdout=-1, text=True)

    def call():
        print(carrier(), file=server.stdin, flush=True)
        assert server.stdout.readline() == "done\\n"

    configure(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}})
    for step in range(3):
        with capture(step), span("tool", role="env"):
            call()
            if step == 1:
                call()
    server.terminate()
    assert server.wait() == -15
"""


RANKS = """
import multiprocessing, os, sys, tempfile
from stepscope import attach, capture, carrier, configure, profile_step

@profile_step(role="trainer")
def update(model, place):
    import torch
    with attach(place):
        model(torch.ones(4, 64)).sum().backward()

def rank(number, folder, pipe):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    configure(save_path=f"{folder}/run", steps=[1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for place in iter(pipe.recv, "end"):
        update(model, place)
        pipe.send("done")
    if number == 0:  # a forked child of a rank is no rank
        child = multiprocessing.get_context("fork").Process(target=in_child)
        child.start()
        child.join()
        assert child.exitcode == 0
    dist.destroy_process_group()

def in_child():
    from stepscope._recording.process.identity import torch_rank
    assert torch_rank() is None

if __name__ == "__main__":
    run, context = sys.argv[1], multiprocessing.get_context("spawn")
    folder = os.path.dirname(run)
    configure(save_path=run, steps=[1], roles={"*": {"profiler": "off"}})
    pipes, ranks = [], []
    for number in range(2):
        here, there = context.Pipe()
        ranks.append(context.Process(target=rank, args=(number, folder, there)))
        ranks[-1].start()
        pipes.append(here)
    for step in range(3):
        with capture(step):
            for pipe in pipes:
                pipe.send(carrier())  # in no span
            assert [pipe.recv() for pipe in pipes] == ["done", "done"]
    for pipe in pipes:
        pipe.send("end")
    for process in ranks:
        process.join()
        assert process.exitcode == 0
"""


def run(code: str, folder: Path, *arguments: str) -> str:
    script = folder / "program.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script, str(folder / "run"), *arguments],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "STEPSCOPE_RAISE": "0"},
    )
    return done.stderr


def visitors(folder: Path, step: int) -> list[ProcessPart]:
    parts, unreadable = read_parts(RunLayout(folder / "run").step(step))
    assert not unreadable
    assert fold(parts).state == "ok"
    assert sum(part.owner for part in parts) == 1
    return [part for part in parts if part.process.role == ROLE]


def spans(folder: Path, step: int, part: ProcessPart) -> list[Span]:
    path = StepLayout(folder / "run" / f"step_{step:06d}").spans_of(part.process, part.run_id)
    lines = msgspec.json.Decoder(Line).decode_lines(path.read_bytes())
    return [line for line in lines if isinstance(line, Span)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_pool_record_what_they_do_for_a_captured_step(tmp_path: Path, method: str) -> None:
    run(POOL, tmp_path, method)
    for step in (1, 2):
        recorded = [span for part in visitors(tmp_path, step) for span in spans(tmp_path, step, part)]
        verified = [span for span in recorded if span.stage == "verify"]
        assert sorted(str(span.attrs["sample"]) for span in verified if span.attrs) == list("012345")
        assert all(span.dur_ns >= 10**7 for span in verified)
        tops = [span for span in recorded if span.parent is None]
        assert {span.link.step for span in tops if span.link} == {step}
        assert len(tops) == len([span for span in tops if span.link])
    assert set(RunLayout(tmp_path / "run").steps()) == {1, 2}  # and no folder of a step without a capture


def test_a_server_records_what_it_does_for_captured_steps_alone(tmp_path: Path) -> None:
    run(SERVER, tmp_path)
    (part,) = visitors(tmp_path, 1)
    assert [span.stage for span in spans(tmp_path, 1, part)] == ["search", "search"]
    assert set(RunLayout(tmp_path / "run").steps()) == {1}


@pytest.mark.needs("torch")
def test_ranks_record_their_step_and_its_collectives_below_a_carrier_without_a_span(tmp_path: Path) -> None:
    run(RANKS, tmp_path)
    parts = visitors(tmp_path, 1)
    assert sorted((part.process.rank, part.process.world_size) for part in parts) == [(0, 2), (1, 2)]
    for part in parts:
        recorded = spans(tmp_path, 1, part)
        assert [span.stage for span in recorded if not span.attrs] == ["update"]
        assert [span.stage for span in recorded if span.attrs and span.attrs.get("begin_only")]
    assert set(RunLayout(tmp_path / "run").steps()) == {1}


def test_a_process_that_is_not_configured_says_once_that_it_records_nothing(tmp_path: Path) -> None:
    said = run(POOL.replace("initializer=set_up", "initializer=time.time"), tmp_path, "spawn")
    assert not visitors(tmp_path, 1)
    assert 1 <= said.count("is not configured") <= 2  # in each of the two children
