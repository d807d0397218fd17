"""Cost of the preset `verl` in steps that are not captured: `main_ppo` under `stepscope run` against plain.

ms of a step by verl's own clock (`timing_s/step`), of whole trainings that take turns: GRPO, RayPPOTrainer, a
real vLLM, on the CPU. The preset's training selects a step that never comes. The default trainer of verl 0.9
would hide a cost behind the 2 s for which it polls. Needs an environment with verl: `dev.py test --engines
verl-0.9.1` makes one, whose Python runs this. A training takes some two minutes to start.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from _measure import Measured, arguments, header, ratio_interval, table, verdict

# The folder that holds the recipe of a training on a CPU, which the tests use as well.
sys.path.insert(0, str(Path(__file__).parents[1]))

from packages.core.tests.verl_cpu.launch import train
from packages.core.tests.verl_cpu.runs import printed_metrics

ROUNDS = 3
STEPS, WARM_UP = 40, 5
PLAIN, PRESET = "plain", "preset, another step selected"


def steps_of(folder: Path, contender: str) -> list[float]:
    """Train, and return the ms of each step after those that warm up."""
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
                results[contender] += steps_of(Path(folder), contender)
    ratio, low, high = ratio_interval(results[PRESET], results[PLAIN])
    rows = [[name, str(len(ms)), f"{statistics.median(ms):.1f}"] for name, ms in results.items()]
    table(["GRPO", "steps", "ms/step"], rows)
    print(f"ratio {ratio:.3f}x, 95 % of resampled medians within {low:.3f}x to {high:.3f}x")
    verdict("a step with the preset: against plain", ratio, 1.01, "x")


if __name__ == "__main__":
    main()
