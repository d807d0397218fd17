"""Error rates of the gate of `stepscope diff`, on pairs of simulated runs of 60 recorded steps.

Each stage varies by 4 % from step to step, neighbouring steps are similar, and one step in fifty has a
straggler. The gate has limits for the step and for five stages. In half of the pairs nothing changes, and the
limits are 0 %, so that only the confidence intervals decide. In the other half, one stage takes 5 % longer
(each stage in turn), and the limits are 2 %. The seed of a pair is its number.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _measure import arguments, header, table, verdict

sys.path.insert(0, str(Path(__file__).parents[1]))
from packages.report.tests.simulated_gate import SECONDS, names_stage, pair_gate

PAIRS = 200


def main() -> None:
    pairs = PAIRS // 10 if arguments(__doc__).quick else PAIRS
    header("The gate of stepscope diff", "stepscope")
    stages = list(SECONDS)
    false = sum(pair_gate(seed, limit=0).failed for seed in range(pairs))
    planted = [stages[seed % len(stages)] for seed in range(pairs)]
    named = [names_stage(pair_gate(pairs + seed, stage), stage) for seed, stage in enumerate(planted)]
    rows = [
        (stage, f"{sum(hit for hit, name in zip(named, planted, strict=True) if name == stage)}",
         f"{planted.count(stage)}")
        for stage in stages
    ]  # fmt: skip
    table(("slowed by 5 %", "failed for it", "pairs"), rows)
    verdict(f"{pairs} pairs without a change: failed", 100 * false / pairs, 5, " %")
    verdict(f"{pairs} pairs with one: found", 100 * sum(named) / pairs, 90, " %", at_least=True)


if __name__ == "__main__":
    main()
