"""A toy model under the Trainer of transformers, with the callback of stepscope.

torchrun callback_main.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from stepscope.integrations.transformers import StepscopeCallback


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


def train(folder: Path, *callbacks: TrainerCallback, **settings: object) -> None:
    """Train for four steps of two batches each. `settings` are further ones of `TrainingArguments`."""
    batches = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(32)]
    trainer = Trainer(
        model=Toy(),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=batches,
        eval_dataset=batches[:2],
        callbacks=list(callbacks),
    )
    trainer.train()


if __name__ == "__main__":
    output = Path(sys.argv[1])
    roles = {"*": {"profiler": "off"}}
    train(output, StepscopeCallback(steps=[2], save_path=output / "run", roles=roles))
