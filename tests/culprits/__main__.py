"""Count how often the first lines of `why` and of a report name the culprit that was planted.

python3 dev.py culprits [--hangs | --steps] [--runs N] [WORDS OF A NAME]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.culprits.hangs import HANGS, ask, hanging
from tests.culprits.steps import SLOW_STEPS, run_steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py culprits", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--hangs", action="store_true", help="only `stepscope why` on hangs")
    which.add_argument("--steps", action="store_true", help="only the cause of slow steps")
    parser.add_argument("--runs", type=int, default=10, help="runs of each (10)")
    parser.add_argument("words", nargs="*", help="words of a name")
    asked = parser.parse_args()
    words = " ".join(asked.words)
    wrong = 0
    if not asked.steps:
        wrong += _hangs(asked.runs, words)
    if not asked.hangs:
        wrong += _steps(asked.runs, words)
    return 1 if wrong else 0


def _hangs(runs: int, words: str) -> int:
    """Print a line for each hang, and return the number of wrong answers."""
    print(f"  {'hang':40} {'kind':>5} {'process':>8} {'call':>5} {'slowest':>8}")
    wrong = 0
    for hang in HANGS:
        if words not in hang.name:
            continue
        answers = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder, hanging(hang, Path(folder) / "run"):
                answers.append(ask(hang, Path(folder) / "run"))
        kinds = sum(answer.kind for answer in answers)
        processes = sum(answer.process for answer in answers)
        calls = sum(answer.call for answer in answers)
        slowest = max(answer.took_s for answer in answers)
        print(f"  {hang.name:40} {kinds:>5} {processes:>8} {calls:>5} {slowest:>6.1f} s", flush=True)
        for line in {answer.line for answer in answers if not answer.is_right}:
            wrong += 1
            print(f"    {line}")
    return wrong


def _steps(runs: int, words: str) -> int:
    """Print a line for each culprit of slow steps, and return the number of causes that are wrong."""
    print(f"  {'slow step':40} {'kind':>5} {'process':>8} {'stage':>6} {'all':>4} {'5 %':>4} {'runs':>5}")
    every = []
    for slow in SLOW_STEPS:
        if words not in slow.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            verdicts = run_steps(slow, Path(folder) / "run", runs)
        every += verdicts
        kinds, processes, stages, named, numbers = (
            sum(getattr(verdict, field) for verdict in verdicts)
            for field in ("kind", "process", "stage", "is_named", "number")
        )
        print(
            f"  {slow.name:40} {kinds:>5} {processes:>8} {stages:>6} {named:>4} {numbers:>4} {runs:>5}",
            flush=True,
        )
        for verdict in verdicts:
            if not verdict.is_right:
                print(f"    {verdict.line}")
    print(f"  {sum(verdict.is_named for verdict in every)} of {len(every)} name the culprit")
    return sum(not verdict.is_named for verdict in every)


sys.exit(main())
