"""`python script.py key=value ...`: a script as SkyRL's examples are, with an environment of its own."""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.utils import initialize_ray
from skyrl_gym.envs import register


class Experiment(BasePPOExp):  # type: ignore[misc]  # skyrl is not checked
    """SkyRL's experiment, whose prompts one process filters."""

    def get_train_dataset(self) -> Any:
        """Return the prompts. SkyRL's own starts eight processes for it."""
        longest = self.cfg.trainer.max_prompt_length
        return PromptDataset(self.cfg.data.train_data, self.tokenizer, longest, num_workers=1)

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer that the settings ask for."""
        if self.cfg.trainer.fully_async.enabled:
            return FullyAsyncRayPPOTrainer(*args, **kwargs)
        return super().get_trainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def train(settings: SkyRLTrainConfig) -> None:
    """Train in a Ray task, as SkyRL does."""
    register(id="sums", entry_point="sums:SumsEnv")
    Experiment(settings).run()


if __name__ == "__main__":
    chosen = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(chosen)
    initialize_ray(chosen)
    ray.get(train.remote(chosen))
