"""Interleaved measurement: every contender in every round, in turning order, medians and ratios printed."""

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
"""The contenders around a generation of an engine."""


def arguments(doc: str | None) -> argparse.Namespace:
    """Parse `--quick`, which does a tenth of the work and gives rough numbers."""
    return parser(doc).parse_args()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a benchmark with options of its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a tenth of the work: rough numbers")
    return made


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int, *, collector: bool = False
) -> Measured:
    """Return the results of each contender by round. The order of contenders turns.

    Args:
        collector: Whether the garbage collector runs as in the user's program. It adds noise.
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
    """Median of the differences within each round: what slows a whole round down cancels."""
    return statistics.median(a - b for a, b in zip(results[name], results[bare], strict=True))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians, and the interval that holds 95 % of those of 2,000 resamples."""
    draw = random.Random(0).choices
    resampled = sorted(
        statistics.median(draw(ours, k=len(ours))) / statistics.median(draw(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return statistics.median(ours) / statistics.median(theirs), resampled[50], resampled[-51]


def captures_of_an_engine(
    results: Measured, generating: Mapping[str, list[float]], cpu: Mapping[str, float]
) -> None:
    """The goals that a capture of an engine is held to: ms of start and stop by round, of each generation,
    and of CPU, by contender.
    """
    hand, off = statistics.median(results[HAND]), median_over(results, OFF, ALONE)
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(results[CAPTURE], results[HAND], strict=True)
    )
    verdict("start and stop of a capture against by hand", ratio, 1.01, "x")
    beyond = 100 * (cpu[CAPTURE] - cpu[HAND]) / hand
    verdict("CPU of a capture beyond by hand, of a start and stop by hand", beyond, 1, " %")
    # Over a `with` that does nothing: behind a generation Python's first lines alone cost much.
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
