"""A table of predicted and measured step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from _measure import table, verdict

from stepscope_report.whatif.prediction import Prediction


def show(results: Mapping[str, Sequence[tuple[Prediction, float]]], unchanged: Sequence[Prediction]) -> None:
    """Print the medians of predicted and measured times, the errors of the medians, and the verdicts.

    Args:
        results: {change: (prediction, measured seconds of the step with the change) of each round}.
        unchanged: Predictions of steps without a change.
    """
    off = [abs(one.replayed_ns / one.measured_ns - 1) for one in unchanged]
    replayed = median(one.replayed_ns for one in unchanged) / 1e9
    print(f"without a change: {_spread([one.measured_ns / 1e9 for one in unchanged])}, ", end="")
    print(f"replayed {replayed:.2f} s\n")
    rows, errors, inside = [], [], 0
    for name, pairs in results.items():
        predicted, measured = [one.predicted_ns / 1e9 for one, _ in pairs], [seconds for _, seconds in pairs]
        low = median(one.low_ns for one, _ in pairs) / 1e9
        high = median(one.high_ns for one, _ in pairs) / 1e9
        errors.append(median(predicted) / median(measured) - 1)
        inside += sum(one.low_ns <= seconds * 1e9 <= one.high_ns for one, seconds in pairs)
        bar = f"{median(predicted):.2f} s ({low:.2f} to {high:.2f})"
        rows.append((name, bar, _spread(measured), f"{100 * errors[-1]:+.1f} %"))
    table(("change", "predicted (95 %)", "measured (least to most)", "error"), rows)
    verdict("the step without a change, replayed: off by at most", 100 * max(off), 3, " %")
    verdict("largest error of a change", 100 * max(map(abs, errors)), 10, " %")
    close = sum(abs(error) <= 0.1 for error in errors)
    verdict("changes predicted within 10 %", close, min(5, len(errors)), "", at_least=True)
    print(f"        in the interval: {inside} of {sum(map(len, results.values()))}")


def _spread(seconds: Sequence[float]) -> str:
    """Return the median, the smallest and the largest value as text."""
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
