"""Cost of listening for captures on demand, in each step and in the listening thread.

Steps that are not captured take turns with `control.requests` on and off, first without `control.json`, then
with a `control.json` that requests a far step. Then one poll of the thread is timed, which comes every
`control.poll_seconds`.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

from _measure import arguments, header, interleaved, median_over, table, verdict

from stepscope import ProfileConfig, capture, request_capture
from stepscope._recording.capture import on_demand

OFF, ON = "off", "on"


def steps(config: ProfileConfig, count: int) -> Callable[[], float]:
    def run() -> float:
        began = time.process_time_ns()
        for step in range(count):
            with capture(step, config=config):
                pass
        return (time.process_time_ns() - began) / count / 1000

    return run


def look(listener: on_demand.Listener, count: int) -> float:
    """Return the CPU us of one poll of the thread that finds nothing new."""
    began = time.process_time_ns()
    for _ in range(count):
        listener._look()
        listener._write()
    return (time.process_time_ns() - began) / count / 1000


def main() -> None:
    quick = arguments(__doc__).quick
    header("captures on demand: listening", "stepscope")
    count, rounds = (200, 5) if quick else (2000, 15)
    rows = []
    folder = tempfile.mkdtemp()
    on = ProfileConfig(save_path=folder, record="off", control={"poll_seconds": 3600})
    sides = {OFF: steps(on.replace(control={"requests": False}), count), ON: steps(on, count)}
    costs: list[float] = []
    try:
        for what in ("no request", "a request for step 1,000,000"):
            if costs:
                request_capture("1000000", save_path=folder)
            results = interleaved(sides, rounds)
            costs.append(median_over(results, ON, OFF))
            rows.append([what, *(f"{statistics.median(results[side]):.1f}" for side in (OFF, ON))])
            rows[-1].append(f"{costs[-1]:.1f}")
        listener = on_demand._listener
        assert listener is not None
        turn = look(listener, count)
    finally:
        shutil.rmtree(folder)
    table(["CPU us for a step that is not captured", OFF, ON, "difference"], rows)
    share = turn / (ProfileConfig().control.poll_seconds * 1e6)
    print(f"  one look of the thread: {turn:.1f} us, every 2 s: {share:.6%} of a core\n")
    verdict("listening adds to a step", max(costs), 50, " us")


if __name__ == "__main__":
    main()
