"""Run each hang some times, and print how often `stepscope why` names its culprit in the first line.

python -m tests.culprits [TIMES] [WORDS OF A NAME]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.culprits.hangs import HANGS, ask, hanging

TIMES = int(sys.argv[1]) if len(sys.argv) > 1 else 5
WORDS = " ".join(sys.argv[2:])


def main() -> int:
    print(f"  {'hang':40} {'kind':>5} {'process':>8} {'call':>5} {'slowest':>8}")
    wrong = 0
    for hang in HANGS:
        if WORDS not in hang.name:
            continue
        answers = []
        for _ in range(TIMES):
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
    return 1 if wrong else 0


sys.exit(main())
