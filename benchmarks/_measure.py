"""Interleaved measurement: each round runs all contenders in rotating order, and tables show medians."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

Measured = dict[str, list[float]]
HAND, CAPTURE, OFF, ALONE = "by hand", "capture", "capture, step not selected", "no profiler"
"""Names of the contenders of a benchmark with an engine."""


def arguments(doc: str | None) -> argparse.Namespace:
    """Parse the command line of a benchmark whose only option is `--quick`."""
    return parser(doc).parse_args()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--quick`, to which a benchmark can add options."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a tenth of the work: rough numbers")
    return made


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int, *, collector: bool = False
) -> Measured:
    """Return the results of each contender by round. Each round starts with the next contender.

    Args:
        collector: True if the garbage collector stays on, as in a user's program. It adds noise.
    """
    names = list(contenders)
    results: Measured = {name: [] for name in names}
    gc.collect()
    if not collector:
        gc.disable()
    try:
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                value = contenders[name]()
                if turn:  # the first round warms up
                    results[name].append(value)
    finally:
        gc.enable()
    return results


def median_over(results: Measured, name: str, bare: str) -> float:
    """Return the median of the differences within each round, in which a slow round cancels out."""
    return statistics.median(a - b for a, b in zip(results[name], results[bare], strict=True))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return (the ratio of the medians, the 95 % interval of this ratio by 2,000 resamples)."""
    draw = random.Random(0).choices
    resampled = sorted(
        statistics.median(draw(ours, k=len(ours))) / statistics.median(draw(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return statistics.median(ours) / statistics.median(theirs), resampled[50], resampled[-51]


def captures_of_an_engine(
    results: Measured, generating: Mapping[str, list[float]], cpu: Mapping[str, float]
) -> None:
    """Print whether a capture of an engine meets its goals.

    Args:
        results: {contender: ms of start and stop, by round}.
        generating: {contender: ms of each generation}.
        cpu: {contender: ms of CPU of a start and stop}.
    """
    hand, off = statistics.median(results[HAND]), median_over(results, OFF, ALONE)
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(results[CAPTURE], results[HAND], strict=True)
    )
    verdict("start and stop of a capture against by hand", ratio, 1.01, "x")
    beyond = 100 * (cpu[CAPTURE] - cpu[HAND]) / hand
    verdict("CPU of a capture beyond by hand, of a start and stop by hand", beyond, 1, " %")
    # Compared with an empty `with`: after a generation, even the first lines of Python are slow.
    took = statistics.median(generating[ALONE][1:])
    verdict("a step that is not selected, of its generation", 100 * off / took, 0.1, " %")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        first, *rest = (cell for cell in row)
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def header(title: str, *distributions: str) -> None:
    versions = ", ".join(f"{name} {_version(name)}" for name in distributions)
    print(f"{title}\nPython {sys.version.split()[0]}, {platform.system()} {platform.machine()}, ", end="")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {versions}\n")


def verdict(what: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> None:
    met = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{'met   ' if met else 'MISSED'}  {what}: {value:.2f}{unit}, goal {sign} {limit:g}{unit}")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
