"""Trainers of TRL on a toy model; GRPO is that of `examples/trl_grpo.py`. Nothing here knows of any profiler.

python trl_script.py FOLDER CASE...
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

from examples.trl_grpo import PROMPTS, count_ones, make_trainer, save_model, save_tokenizer
from packages.core.tests import timed_rewards

SMALL: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
}
SUMS = [(f"{number}+{number}=", f"{2 * number}") for number in range(8)] * 4


def save_tiny_models(folder: str) -> None:
    save_model(f"{folder}/model")
    save_tokenizer(f"{folder}/judge")
    save_tokenizer(f"{folder}/pupil")
    # What lies between two stages takes half a millisecond: a twentieth of a step of the other model.
    config = Qwen2Config.from_pretrained(
        f"{folder}/model",
        num_labels=1,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=["full_attention"] * 4,
    )
    Qwen2ForCausalLM(config).save_pretrained(f"{folder}/pupil")
    Qwen2ForSequenceClassification(config).save_pretrained(f"{folder}/judge")


def prompts() -> Dataset:
    return Dataset.from_list(PROMPTS)


def answers() -> Dataset:
    return Dataset.from_list([{"prompt": prompt, "completion": answer} for prompt, answer in SUMS])


def pairs() -> Dataset:
    return Dataset.from_list([{"prompt": p, "chosen": answer, "rejected": "0"} for p, answer in SUMS])


def grpo(folder: str) -> Any:
    return make_trainer(f"{folder}/model", f"{folder}/out")


def shared_grpo(folder: str) -> Any:
    """A trainer whose generations are of three batches, where a step of the optimizer takes two."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        f"{folder}/out", num_generations=4, max_completion_length=4, beta=0.1, steps_per_generation=3, **SMALL
    )
    return GRPOTrainer(model=f"{folder}/model", reward_funcs=count_ones, args=args, train_dataset=prompts())


def timed_grpo(folder: str) -> Any:
    trainer = grpo(folder)
    trainer.reward_funcs[0] = timed_rewards.rewards
    return trainer


def evaluated_sft(folder: str) -> Any:
    """A trainer that evaluates and saves after its second step."""
    from trl import SFTConfig, SFTTrainer

    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = SFTConfig(f"{folder}/out", **{**SMALL, **often})
    rows = answers()
    return SFTTrainer(
        model=f"{folder}/pupil", args=args, train_dataset=rows, eval_dataset=rows.select([0, 1])
    )


def rloo(folder: str) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(f"{folder}/out", num_generations=4, max_completion_length=4, beta=0.1, **SMALL)
    return RLOOTrainer(model=f"{folder}/model", reward_funcs=count_ones, args=args, train_dataset=prompts())


def sft(folder: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=f"{folder}/pupil", args=SFTConfig(f"{folder}/out", **SMALL), train_dataset=answers()
    )


def dpo(folder: str) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=f"{folder}/pupil", args=DPOConfig(f"{folder}/out", **SMALL), train_dataset=pairs()
    )


def kto(folder: str) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": p, "completion": a, "label": n % 2 == 0} for n, (p, a) in enumerate(SUMS)]
    args = KTOConfig(f"{folder}/out", **SMALL)
    return KTOTrainer(model=f"{folder}/pupil", args=args, train_dataset=Dataset.from_list(rows))


def reward(folder: str) -> Any:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=f"{folder}/judge", args=RewardConfig(f"{folder}/out", **SMALL), train_dataset=pairs()
    )


def online_dpo(folder: str) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(f"{folder}/out", max_new_tokens=4, max_length=16, **SMALL)
    model = f"{folder}/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    return OnlineDPOTrainer(
        model=model,
        reward_funcs=count_ones,
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer,
    )


def gkd(folder: str) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    args = GKDConfig(f"{folder}/out", lmbda=1.0, max_new_tokens=4, max_length=16, **SMALL)
    model = f"{folder}/model"
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]} for p, a in SUMS
    ]
    return GKDTrainer(
        model=model,
        teacher_model=model,
        args=args,
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def cpo(folder: str) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(f"{folder}/out", max_length=16, **SMALL)
    model = f"{folder}/model"
    return CPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(model),
        args=args,
        train_dataset=pairs(),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


CASES = {
    case.__name__: case
    for case in (
        grpo,
        shared_grpo,
        timed_grpo,
        rloo,
        sft,
        evaluated_sft,
        dpo,
        kto,
        reward,
        online_dpo,
        gkd,
        cpo,
    )
}


class OwnClock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """The times of a trainer's steps of the optimizer and of their parts, by a clock of its own. A step lasts
    from fetching its batches to the next fetch.
    """

    def __init__(self, trainer: Any) -> None:
        self.steps: list[Counter[str]] = []
        self._marks: dict[str, int] = {}
        trainer.compute_loss = self._timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = self._timed("backward", trainer.accelerator.backward)
        trainer.get_batch_samples = self._begun(trainer.get_batch_samples)
        trainer.add_callback(self)

    def _begun(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def begun(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            self._end_step()
            self.steps.append(Counter())
            marked = iter(functools.partial(self._first, batches), self)  # the clock itself is no batch
            return theirs(marked, *args, **kwargs)

        return begun

    def _first(self, batches: Iterator[Any]) -> Any:
        if not self.steps[-1]:  # the capture has opened, which is no part of the step
            self._marks["step"] = time.perf_counter_ns()
            self.steps[-1]["fetched"] = 1
        return next(batches)

    def _end_step(self) -> None:
        if self.steps:
            self.steps[-1]["step"] = time.perf_counter_ns() - self._marks["step"]

    def _timed(self, name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            try:
                return theirs(*args, **kwargs)
            finally:
                self.steps[-1][name] += time.perf_counter_ns() - begun_ns

        return timed

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end_step()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._marks["optimizer"] = time.perf_counter_ns()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps[-1]["optimizer"] += time.perf_counter_ns() - self._marks["optimizer"]


def main(folder: str, *cases: str) -> None:
    for case in cases:
        trainer = CASES[case](folder)
        clock = OwnClock(trainer)
        trainer.train()
        Path(folder, f"{case}.json").write_text(json.dumps(clock.steps))
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in trainer.model.state_dict().values())
        ends = [hashlib.sha256(weights).hexdigest(), *timed_rewards.reached]
        Path(folder, f"{case}.sha256").write_text("\n".join(ends))


if __name__ == "__main__":
    own = f"{sys.argv[1]}/rank{os.environ.get('RANK', '0')}"
    save_tiny_models(own)
    main(own, *sys.argv[2:])
