"""An ordinary RLlib script: nothing in it knows of any profiler.

python rllib_script.py FILE [ITERATIONS [LEARNERS]]
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import ray
from ray.rllib.algorithms import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig


def configuration(learners: int) -> PPOConfig:
    """Return PPO on CartPole with two env runners."""
    return (
        PPOConfig()  # type: ignore[no-untyped-call]  # Ray's
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, rollout_fragment_length=200)
        .learners(num_learners=learners)
        .training(train_batch_size_per_learner=400, minibatch_size=100, num_epochs=2)
        .debugging(seed=7)
    )


def digest(algorithm: Algorithm) -> str:
    assert algorithm.learner_group is not None
    weights = algorithm.learner_group.get_weights()["default_policy"]
    return hashlib.sha256(b"".join(np.asarray(weights[key]).tobytes() for key in sorted(weights))).hexdigest()


def main(file: str, iterations: int = 3, learners: int = 0) -> None:
    ray.init("local", num_cpus=4, include_dashboard=False)
    algorithm = configuration(learners).build_algo()
    results = [algorithm.train() for _ in range(iterations)]  # type: ignore[no-untyped-call]  # Ray's
    outcome = {
        "returns": [result["env_runners"]["episode_return_mean"] for result in results],
        "seconds": [result["time_this_iter_s"] for result in results],
        "timers": [result["timers"] for result in results],
        "weights": digest(algorithm),
    }
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(outcome, stream)
    algorithm.stop()  # type: ignore[no-untyped-call]  # Ray's


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
