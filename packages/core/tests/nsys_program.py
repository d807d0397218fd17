"""A program for a real nsys, whose ranges have the number of their step.

python nsys_program.py RUN STEPS SETTINGS [spawn]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

from stepscope import capture, configure, flush, profile_step, span

WORK_S = 0.1


def child() -> None:
    import nvtx  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

    made = nvtx.start_range(message="in a child")
    time.sleep(WORK_S)
    nvtx.end_range(made)


@profile_step(role="actor")
def update(step: int) -> None:
    with span(f"forward{step}"):
        time.sleep(WORK_S)
    if "spawn" in sys.argv:
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()


def main() -> None:
    steps = json.loads(sys.argv[2])
    configure(
        save_path=sys.argv[1], steps=steps, tool="nsys", roles={"actor": {"ranks": "all"}}, counters="off",
        **json.loads(sys.argv[3]),
    )  # fmt: skip
    for step in range(max(steps) + 2):
        with capture(step, role="actor", rank=0), span(f"whole{step}", role="trainer"):
            update(step)
    print("unwritten", flush(100), flush=True)


if __name__ == "__main__":
    main()
