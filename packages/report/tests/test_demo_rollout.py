"""The demo's inference engine: many requests share its forward passes, and none of them is left waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.engines import passes
from stepscope.files.passes import read_passes
from stepscope.testing.engine_conformance import a_capture
from stepscope_report.demo import task
from stepscope_report.demo.rollout import SLOTS, RolloutReplica

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
