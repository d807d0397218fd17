"""The demo's inference engine: many requests share its forward passes, and none of them is left waiting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope import ProfileConfig, capture, carrier, span, trajectory, turn
from stepscope._recording.process.identity import run_id
from stepscope.engines import passes
from stepscope.files.layout import RunLayout
from stepscope.files.passes import read_passes
from stepscope.testing.engine_conformance import a_capture
from stepscope_report import step_report
from stepscope_report.demo import rollout, task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.model import KVCache, Transformer, View, token_log_probs
from stepscope_report.demo.rollout import SLOTS, RolloutReplica
from stepscope_report.demo.task import group_advantages
from stepscope_report.timeline import Timeline, load_step
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import predict

PROMPT = task.encode("^8+5=")


@pytest.fixture
def replica() -> RolloutReplica:
    torch.manual_seed(0)
    return RolloutReplica(seed=0)


def count_passes(replica: RolloutReplica) -> list[int]:
    """Return the batch size of each forward pass, as they come."""
    sizes: list[int] = []
    replica.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    return sizes


async def test_requests_that_come_together_share_forward_passes(replica: RolloutReplica) -> None:
    passes = count_passes(replica)
    await asyncio.gather(*(replica.generate(PROMPT, str(seed), None) for seed in range(SLOTS)))
    assert passes[0] == SLOTS
    assert len(passes) <= task.TURN_TOKENS


async def test_the_noted_passes_are_those_that_ran(replica: RolloutReplica, tmp_path: Path) -> None:
    sizes = count_passes(replica)
    capture = msgspec.structs.replace(a_capture(tmp_path), passes=1000)
    passes.begin(capture)
    outputs = await asyncio.gather(*(replica.generate(PROMPT, str(n), None) for n in range(SLOTS + 1)))
    (artifact,) = passes.end(capture)
    file = read_passes(Path(capture.step_dir, artifact.path))
    assert file.passes.requests == sizes
    assert sum(file.served.output) == sum(map(len, outputs))
    assert file.passes.waiting[0] == 1


async def test_more_requests_than_slots_wait_for_their_turn(replica: RolloutReplica) -> None:
    passes = count_passes(replica)
    requests = 3 * SLOTS
    outputs = await asyncio.gather(*(replica.generate(PROMPT, str(n), None) for n in range(requests)))
    assert all(outputs)
    assert max(passes) == SLOTS
    assert sorted(replica.free) == list(range(SLOTS))


async def test_what_is_sampled_does_not_depend_on_who_shares_the_batch(replica: RolloutReplica) -> None:
    alone = [await replica.generate(PROMPT, str(seed), None) for seed in range(8)]
    together = await asyncio.gather(*(replica.generate(PROMPT, str(seed), None) for seed in range(8)))
    assert together == alone


async def test_a_forward_pass_that_fails_fails_every_request_and_not_the_next_ones(
    replica: RolloutReplica,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = replica.model.register_forward_pre_hook(fail)
    requests = (replica.generate(PROMPT, str(n), None) for n in range(SLOTS + 1))
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert {str(error) for error in errors} == {"out of memory"}
    hook.remove()
    assert await replica.generate(PROMPT, "0", None)


PASS_MS, REQUEST_MS = 6, 0.75
"""Time of a forward pass, and of each request in it, of `timed_run`."""


async def timed_run(root: Path, slots: int, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """Return a captured step of 32 conversations of two turns with an engine of a known service curve."""
    monkeypatch.setattr(rollout, "SLOTS", slots)
    monkeypatch.setattr(task, "TURN_TOKENS", 60)
    monkeypatch.setattr(task, "END_OF_TURN", {0})
    replica, config = (
        RolloutReplica(seed=0),
        ProfileConfig(save_path=root, steps="0", roles={"*": {"profiler": "off"}}),
    )

    due_s = 0.0

    def forward(tokens: torch.Tensor, _view: object) -> torch.Tensor:
        nonlocal due_s  # what the machine adds to a pass is taken from the next
        due_s = max(due_s, time.monotonic() - 0.1) + (PASS_MS + REQUEST_MS * len(tokens)) / 1000
        time.sleep(max(0.0, due_s - time.monotonic()))
        return torch.zeros(*tokens.shape, len(task.VOCABULARY))

    monkeypatch.setattr(replica, "model", forward)

    async def converse(number: int) -> None:
        with trajectory(f"t{number}"):
            for index in range(2):
                with turn(index), span("generate", role="rollout"):
                    await replica.generate(PROMPT, f"{number}-{index}", carrier())

    layout = RunLayout(root).step(0)
    async with capture(0, config=config):
        noted = msgspec.structs.replace(
            a_capture(root), step=0, run_id=run_id(), passes=10_000, replica=0,
            out_dir=str(layout.engine_dir(0)), step_dir=str(layout.root),
        )  # fmt: skip
        passes.begin(noted)
        await asyncio.gather(*map(converse, range(32)))
        passes.end(noted)
    return load_step(layout.root)


@pytest.mark.slow
async def test_a_larger_batch_takes_what_the_measured_curve_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = await timed_run(tmp_path / "few", 6, monkeypatch)
    prediction = predict(few, Options(max_requests="x2"))
    many = await timed_run(tmp_path / "many", 12, monkeypatch)
    assert (prediction.model.measured, prediction.model.slots) == (True, 6)
    last = prediction.model.curve[-1]
    known = last.requests / (PASS_MS + REQUEST_MS * last.requests) * 1000
    assert known / 2 < last.tokens_per_second <= 1.2 * known
    assert prediction.predicted_ns < 0.9 * prediction.measured_ns
    assert prediction.predicted_ns == pytest.approx(many.window.wall_ns, rel=0.2)
    advice = {one.rule: one for one in step_report(few).advice}
    assert advice["queueing"].saves_ns is not None
    assert advice["queueing"].saves_ns > 0.2 * few.window.wall_ns  # by another replica: its cache is full


# The demo's model and its GRPO arithmetic.


@torch.inference_mode()
def test_decoding_with_the_cache_gives_the_logits_of_a_whole_forward() -> None:
    torch.manual_seed(0)
    model, cache = Transformer(), KVCache(slots=5)
    tokens = torch.randint(1, len(task.VOCABULARY), (2, 12))
    lengths, slots = torch.tensor([7, 4]), torch.tensor([3, 0])  # of the prompts; the shorter one is padded
    prompts = tokens[:, :7].clone()
    prompts[1, 4:] = task.PADDING
    model(prompts, View(cache, slots, torch.arange(7).expand(2, 7)))
    for step in range(5):
        positions = (lengths + step)[:, None]
        decoded = model(tokens.gather(1, positions), View(cache, slots, positions))[:, 0]
        whole = model(tokens)[torch.arange(2), positions[:, 0]]
        torch.testing.assert_close(decoded, whole)


def test_log_probs_are_of_the_token_that_follows() -> None:
    model, tokens = Transformer(), torch.tensor([[1, 2, 3]])
    expected = model(tokens)[0, 0].log_softmax(-1)[2]
    torch.testing.assert_close(token_log_probs(model, tokens)[0, 0], expected)


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages([0.0, 1.0, 1.0, 1.0], group=2)
    assert advantages.flatten().tolist() == pytest.approx([-0.7070, 0.7070, 0.0, 0.0], abs=1e-3)


# The demo's tool: a process that computes, refuses, and ends.


async def test_it_computes_in_another_process() -> None:
    async with Calculator() as calculator:
        assert await calculator.ask("8+5") == "13"
        assert await calculator.ask("5-8") == "-3"
        assert calculator.pid != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["", "8+", "8*5", "-3+5", "8+5+1", "__import__('os')", "८+५"])
async def test_what_is_no_expression_is_refused(expression: str) -> None:
    async with Calculator() as calculator:
        assert await calculator.ask(expression) == "!"


async def test_one_that_was_killed_is_an_error_and_no_endless_wait() -> None:
    async with Calculator() as calculator:
        os.kill(calculator.pid, 9)
        with pytest.raises(RuntimeError, match=f"pid {calculator.pid}. is gone"):
            await calculator.ask("1+1")


async def test_an_answer_that_nobody_waited_for_is_never_taken_for_the_next_one() -> None:
    async with Calculator() as calculator:
        asking = asyncio.create_task(calculator.ask("1+1"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(RuntimeError, match="is gone"):
            await calculator.ask("2+2")


def test_a_torch_without_numpy_warns_of_nothing() -> None:
    program = "import sys; sys.modules['numpy'] = None; import stepscope_report.demo.model"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stderr == ""
