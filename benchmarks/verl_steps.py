"""Cost of the preset `verl` in steps that are not captured: `main_ppo` with and without `stepscope run`.

Whole trainings take turns: GRPO with RayPPOTrainer and a real vLLM, on the CPU. The time of a step in ms is
verl's own `timing_s/step`. The training with the preset selects a step that never comes. The default trainer
of verl 0.9 is not used, because it polls every 2 s, which would hide a cost. Run this with the Python of an
environment with verl; `dev.py test --engines verl-0.9.1` makes one. A training takes two minutes to start.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from _measure import Measured, arguments, header, table, verdict

# The checkout, for the launcher of trainings on a CPU, which the tests use as well.
sys.path.insert(0, str(Path(__file__).parents[1]))

from packages.core.tests.verl_cpu.launch import train
from packages.core.tests.verl_cpu.runs import printed_metrics

ROUNDS = 3
STEPS, WARM_UP = 30, 5
PLAIN, PRESET = "plain", "preset, another step selected"


def steps_of(folder: Path, contender: str) -> list[float]:
    """Train, and return the ms of each step after the warm-up."""
    options = ["--preset", "verl", "--steps", str(10**6), "--save-path", str(folder / "run")]
    before = [sys.executable, "-m", "stepscope", "run", *options] if contender == PRESET else []
    overrides = ["trainer.use_v1=False", f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=100"]
    code, output = train(folder, *overrides, before=before)
    if code:
        sys.exit(f"verl exited with {code}:\n{output[-3000:]}")
    metrics = printed_metrics(output)
    return [1000 * metrics[step]["timing_s/step"] for step in sorted(metrics)[WARM_UP:]]


def main() -> None:
    rounds = 1 if arguments(__doc__).quick else ROUNDS
    header("steps of verl's RayPPOTrainer that are not captured", "stepscope", "verl", "vllm", "torch")
    results: Measured = {PLAIN: [], PRESET: []}
    for number in range(rounds):
        order = list(results) if number % 2 == 0 else [*results][::-1]
        for contender in order:
            with tempfile.TemporaryDirectory() as folder:
                results[contender].append(statistics.median(steps_of(Path(folder), contender)))
    ratios = [ours / theirs for ours, theirs in zip(results[PRESET], results[PLAIN], strict=True)]
    rows = [[name, "  ".join(f"{ms:.0f}" for ms in medians)] for name, medians in results.items()]
    table(["GRPO", "ms/step, the median of each training"], rows)
    print(f"ratios of the rounds: {', '.join(f'{ratio:.3f}x' for ratio in ratios)}")
    print(f"plain trainings differ among themselves by {spread(results[PLAIN]):.3f}x\n")
    verdict("a step with the preset: against plain", statistics.median(ratios), 1.01, "x")


def spread(medians: list[float]) -> float:
    """Return the largest median over the smallest, which a ratio may reach by chance."""
    return max(medians) / min(medians)


if __name__ == "__main__":
    main()
