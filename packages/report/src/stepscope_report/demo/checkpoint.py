"""The demo's model in a folder as Hugging Face has them, which real inference engines load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from torch import Tensor

from stepscope_report.demo.batch import pad, solved
from stepscope_report.demo.model import Transformer, llama_config, llama_weights, token_log_probs


def write_checkpoint(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`. A reader sees the earlier weights or these."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(llama_config()))
    part = folder / ".part"
    named = {name: value.contiguous() for name, value in llama_weights(weights).items()}
    save_file(named, part, {"format": "pt"})
    part.rename(folder / "model.safetensors")


def warmed_up(updates: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the weights of a model after supervised updates on solved chains."""
    torch.manual_seed(seed)
    model, rng = Transformer(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(updates):
        tokens, actions = pad([solved(rng) for _ in range(32)])
        loss = -(token_log_probs(model, tokens) * actions).sum() / actions.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
