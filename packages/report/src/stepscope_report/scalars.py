"""The figures of a step that are worth a curve over the run, for whatever draws curves."""

from __future__ import annotations

import re
from collections import Counter

from stepscope_report.model import StepReport
from stepscope_report.table import grouped

_ODD = re.compile(r"[^\w.-]+")


def to_scalars(report: StepReport) -> dict[str, float]:
    """Return seconds by name, as TensorBoard, Weights & Biases and MLflow take them.

    `step/wall_seconds` is the step alone: the sum of `stage/<role>/<stage>_seconds` (each stage's share of
    the wall time), `step/profiler_seconds` (profilers inside the step) and `step/unaccounted_seconds`.
    `capture/opening_seconds` and `capture/closing_seconds` come before and after it.

    `idle/<role>_seconds` is the mean over the role's processes. `long_tail/held_seconds` and
    `long_tail/rollout_seconds` are there where trajectories are. `uncaptured/p50_seconds` and
    `uncaptured/p90_seconds` are of the steps near it that were not captured, where any are known.
    `staleness/steps_p50`, `_max`, `staleness/versions_p50` and `_max` count steps and policy versions, where
    trajectories are stale.

    Where they are known, `throughput/rollout_tokens_per_second` and `throughput/train_tokens_per_second` are
    of the step's time, and `mfu/<role>/<stage>` is a part of 1.

    `trainer/<name>` are numbers that the trainer has logged of the step by then, in its own units.

    In names, what is no letter, digit, `_`, `.` or `-` becomes `-`.
    """
    ns: Counter[str] = Counter(
        {
            "step/wall_seconds": report.breakdown.window_ns,
            "step/profiler_seconds": 0,
            "capture/opening_seconds": report.breakdown.opening_ns,
            "capture/closing_seconds": report.breakdown.closing_ns,
        }
    )
    for line in report.breakdown.lines:
        of = (
            f"stage/{_plain(line.role)}/{_plain(line.stage)}" if line.kind == "stage" else f"step/{line.kind}"
        )
        ns[f"{of}_seconds"] += line.wall_ns
    idle = grouped(report.idle, lambda row: _plain(row.role))
    seconds = {
        f"idle/{role}_seconds": sum(row.idle_ns for row in rows) / len(rows) / 1e9
        for role, rows in idle.items()
    }
    if report.baseline is not None:
        ns["uncaptured/p50_seconds"] = report.baseline.p50_ns
        ns["uncaptured/p90_seconds"] = report.baseline.p90_ns
    stale = report.staleness
    if stale is not None:
        lags = (("steps", stale.steps), ("versions", stale.versions))
        seconds |= {f"staleness/{name}_p50": lag.p50 for name, lag in lags if lag is not None}
        seconds |= {f"staleness/{name}_max": lag.max for name, lag in lags if lag is not None}
    tail = report.long_tail
    if tail is not None and tail.held_ns is not None:
        ns["long_tail/held_seconds"] = tail.held_ns
    if tail is not None and tail.rollout_ns is not None:
        ns["long_tail/rollout_seconds"] = tail.rollout_ns
    seconds |= _throughput(report)
    logged = {f"trainer/{_plain_path(name)}": value for name, value in report.metrics.items()}
    return {name: value / 1e9 for name, value in ns.items()} | seconds | logged


def _throughput(report: StepReport) -> dict[str, float]:
    if report.throughput is None:
        return {}
    rates = {"/".join(filter(None, (rate.phase, rate.role))): rate for rate in report.throughput.rates}
    values = {f"throughput/{_plain_path(name)}_tokens_per_second": rate.per_s for name, rate in rates.items()}
    return values | {
        f"mfu/{_plain(use.role)}/{_plain(use.stage)}": use.mfu
        for use in reversed(report.throughput.uses)
        if use.mfu is not None
    }


def _plain_path(name: str) -> str:
    return "/".join(map(_plain, name.split("/")))


def _plain(name: str | None) -> str:
    return _ODD.sub("-", name or "") or "unnamed"
