"""The demo's model and its GRPO arithmetic."""

from __future__ import annotations

import pytest
import torch

from stepscope_report.demo import task
from stepscope_report.demo.model import KVCache, Transformer, View, token_log_probs
from stepscope_report.demo.task import group_advantages


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
