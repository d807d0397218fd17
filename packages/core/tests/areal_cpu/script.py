"""`script.py --config FILE`: a script as AReaL's examples are, with its workflow of several turns."""

from __future__ import annotations

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.workflow.multi_turn import MultiTurnWorkflow
from datasets import Dataset
from reward import TURNS, ones  # type: ignore[import-not-found]  # beside this script


def prompts(many: int) -> Dataset:
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": f"{number}+{number * 7}="}]} for number in range(many)]
    )


if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    trainer = PPOTrainer(config, train_dataset=prompts(64))
    workflow = MultiTurnWorkflow(ones, config.gconfig, trainer.tokenizer, TURNS, 0.9)
    trainer.train(workflow=workflow)
    trainer.close()
