"""Cost of the preset `trl`, and of the flight recorder, in GRPO steps that are not captured.

Costs are ms of CPU time of the process per step, with one torch thread. A round trains with each of three
settings for some steps, from the same weights and seed, in rotating order. The fastest step of each training
counts, because other work on the machine only makes steps longer. Ratios are those of the medians over the
rounds, with the interval of resampled rounds.

The recorder costs less than the difference between two trainings, so it is switched off and on between the
steps of one training. The CPU time includes the recorder's thread.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
from _measure import arguments, header, interleaved, ratio_interval, table, verdict

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import stepscope
from stepscope._recording.recorder import standing
from stepscope._recording.session import activation

STEPS = 12
ROUNDS = 30
RECORDED_STEPS = 4000
PLAIN, PRESET, SELECTED = "plain", "preset, no step selected", "preset, another step selected"


class StepTimes(TrainerCallback):  # type: ignore[misc]  # not installed where mypy runs
    """Callback that measures the CPU time of each step in ms."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._began = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time_ns()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.taken.append((time.process_time_ns() - self._began) / 1e6)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def count_ones(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("1")) for completion in completions]


class Switch(TrainerCallback):  # type: ignore[misc]  # not installed where mypy runs
    """Callback that switches the recorder off, on, on, off in every four steps, so that drift cancels out."""

    def __init__(self) -> None:
        self.on: list[bool] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        recorder = standing.standing()
        assert recorder is not None
        self.on.append(len(self.on) % 4 in (1, 2))
        activation.keep(recorder if self.on[-1] else None)


def train(folder: str, steps: int, instrument: list[str], selected: list[int]) -> float:
    """Train, and return the ms of the fastest step after the first two."""
    stepscope.configure(instrument=instrument, steps=selected, save_path=f"{folder}/profile")
    return min(timed_steps(folder, steps)[2:])


def recorded(folder: str, steps: int) -> tuple[list[float], list[float], float]:
    """Train with the recorder on in every other step.

    Returns:
        (ms of each step with the recorder off, ms of each step with it on, spans of a step with it on).
    """
    stepscope.configure(
        instrument=["trl"], steps=[10**6], save_path=f"{folder}/recorded", record="spans",
        recorder={"triggers": []},
    )  # fmt: skip
    switch = Switch()
    taken = timed_steps(folder, steps, switch)
    recorder = standing.standing()
    assert recorder is not None
    spans = recorder.log.last_id / sum(switch.on)
    standing.stop()
    sides: dict[bool, list[float]] = {False: [], True: []}
    for on, ms in list(zip(switch.on, taken, strict=True))[40:]:
        sides[on].append(ms)
    return sides[False], sides[True], spans


def added_percent(off: list[float], on: list[float]) -> tuple[float, float, float]:
    """Return the median difference of neighbouring steps in % of a step, and its 95 % interval.

    Neighbours are compared, because TRL's own steps become longer: by a third in 2,000 steps.
    """
    pairs = [after - before for before, after in zip(off, on, strict=True)]
    draw, step = random.Random(0).choices, statistics.median(off) / 100
    resampled = sorted(statistics.median(draw(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs) / step, resampled[50] / step, resampled[-51] / step


def timed_steps(folder: str, steps: int, *callbacks: TrainerCallback) -> list[float]:
    """Train, and return the ms of each step."""
    times = StepTimes()
    trainer = GRPOTrainer(
        model=model(),
        processing_class=tokenizer(),
        reward_funcs=count_ones,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            generation_kwargs={"min_new_tokens": 8},  # equal loads
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(64)]),
        callbacks=[*callbacks, times],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return times.taken


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.set_verbosity_error()
    header("steps of TRL's GRPOTrainer that are not captured", "stepscope", "trl", "transformers", "torch")
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            PLAIN: partial(train, folder, STEPS, [], []),
            PRESET: partial(train, folder, STEPS, ["trl"], []),
            SELECTED: partial(train, folder, STEPS, ["trl"], [10**6]),
        }
        results = interleaved(contenders, ROUNDS // 5 if quick else ROUNDS)
        off, on, spans = recorded(folder, RECORDED_STEPS // 10 if quick else RECORDED_STEPS)
    ratios = {name: ratio_interval(values, results[PLAIN]) for name, values in results.items()}
    rows = [
        [name, f"{statistics.median(values):.2f}", *(f"{number:.3f}x" for number in ratios[name])]
        for name, values in results.items()
    ]
    table(["GRPO", "ms/step", "/ plain", "at least", "at most"], rows)
    for name in (PRESET, SELECTED):
        verdict(f"a step with the {name}: against plain", ratios[name][0], 1.01, "x")
    added, low, high = added_percent(off, on)
    print(f"  {len(on)} pairs of steps of {statistics.median(off):.2f} ms, without and with the recorder:")
    print(f"  {spans:.0f} spans add {added:.2f} % ({low:.2f} to {high:.2f})\n")
    verdict("the recorder adds to a step of TRL", added, 0.3, " %")


if __name__ == "__main__":
    main()
