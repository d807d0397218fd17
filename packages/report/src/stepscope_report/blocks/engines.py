"""Engines as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope_report.blocks.block import Block, Listing, TextTable
from stepscope_report.formatting import LISTED, PROFILED, duration, few, percent_of, percents, starred
from stepscope_report.model import StepReport
from stepscope_report.tables.engine import Engine, Phaseless


def engine_blocks(rows: Sequence[Engine], report: StepReport) -> Iterator[Block]:
    """Yield the times and the requests of each replica, and the engines without phases."""
    if rows:
        yield _times(rows)
        yield request_table(rows)
    if report.phaseless:
        yield Listing("No engine phases", (say_phaseless(report.phaseless),))


_NAME_PHASES = {
    False: (
        'Call them `prefill` and `decode`, as in span("decode", role="rollout"), or give the engine to '
        "capture(engines=...)"
    ),
    True: (
        'Call them `prefill` and `decode`, as in span("decode", role="rollout"): no trace of the engines '
        "given names their iterations"
    ),
}
"""By `Phaseless.given`."""


def say_phaseless(rows: Sequence[Phaseless]) -> str:
    """Name the engines whose phases are not known, and say how to name these."""
    names = few([row.process for row in rows], LISTED)
    stages = ", ".join(sorted({stage for row in rows for stage in row.stages})[:LISTED])
    return (
        f"{names}: unknown when they read prompts and when they wrote tokens; their stages are {stages}"
        f". {_NAME_PHASES[rows[0].given]}"
    )


PHASES = ("prefill", "decode", "mixed", "held up", "paused", "writing", "idle")
ENGINE_NOTE = (
    "In percent of the recorded time. prefill, decode, mixed: passes that read prompts, wrote tokens, or did "
    "both. held up: no pass, though there were requests. By the engine's own iterations where its trace "
    "names them, else by the spans of requests. -: not known."
)
REQUESTS_NOTE = (
    "Of requests that ended, else by the engine's own counters. prompt, tokens: tokens read and written. "
    "cached: of the prompt, in the prefix cache. tokens/s: while it had requests. running, waiting: requests "
    "at once, on average while there were any (and at most)."
)
REQUEST_COLUMNS = (
    "replica", ">requests", ">prompt", ">cached", ">tokens", ">tokens/s", ">preempted",
    ">running", ">waiting",
)  # fmt: skip


def _times(rows: Sequence[Engine]) -> TextTable:
    columns = ("replica", ">iterations", ">recorded", *(f">{phase}" for phase in PHASES))
    cells = tuple(
        (
            name_engine(row, rows),
            iterations_of(row),
            duration(row.recorded_ns),
            *(part or "-" for part in shares_of(row)),
        )
        for row in rows
    )
    return TextTable("Engines", columns, cells, engine_note(rows), noun="replica")


def request_table(rows: Sequence[Engine]) -> TextTable:
    cells = tuple(map(_request_cells, rows))
    return TextTable("Requests of engines", REQUEST_COLUMNS, cells, REQUESTS_NOTE, noun="replica")


def name_engine(row: Engine, rows: Sequence[Engine]) -> str:
    """Return its name, with a `*` if a profiler recorded it and not all of them."""
    return starred(row.replica, row.profiled and not all(other.profiled for other in rows))


def engine_note(rows: Sequence[Engine]) -> str:
    differ = len({row.profiled for row in rows}) > 1
    return f"{ENGINE_NOTE} {PROFILED}" if differ else ENGINE_NOTE


def iterations_of(row: Engine) -> str:
    """Return `0 (idle)`, or with those of each data-parallel engine `50 (24 + 26)`."""
    if row.is_idle:
        return "0 (idle)"
    parts = row.iterations_by_engine
    apart = f" ({' + '.join(f'{number:,}' for number in parts)})" if len(parts) > 1 else ""
    return f"{known(row.iterations)}{apart}"


def engine_times(row: Engine) -> tuple[int | None, ...]:
    """Return the times of `PHASES`."""
    return (
        row.prefill_ns, row.decode_ns, row.mixed_ns, row.held_ns, row.paused_ns, row.writing_ns, row.idle_ns,
    )  # fmt: skip


def shares_of(row: Engine) -> list[str]:
    """Return the percentages of `engine_times`; empty for what is not known."""
    times = engine_times(row)
    shares = iter(percents([ns for ns in times if ns is not None], row.recorded_ns))
    return ["" if ns is None else next(shares) for ns in times]


def _request_cells(row: Engine) -> tuple[str, ...]:
    cached = "-"
    if row.cached_tokens is not None and row.prompt_tokens:
        cached = f"{percent_of(row.cached_tokens, row.prompt_tokens)} %"
    rate = row.output_tokens_per_s
    return (
        row.replica,
        known(row.requests),
        known(row.prompt_tokens),
        cached,
        known(row.output_tokens),
        known(rate if rate is None or rate < 100 else round(rate)),
        known(row.preemptions),
        _at_once(row.running_mean, row.running_most),
        _at_once(row.waiting_mean, row.waiting_most),
    )


def _at_once(mean: float | None, most: int | None) -> str:
    """Return `3.8 (12)`: the mean and the most."""
    return known(mean) if mean is None else f"{mean:,.1f} ({known(most)})"


def known(value: float | None) -> str:
    """Return `1,234`, `3.79`, or `-` for what is not known."""
    return "-" if value is None else f"{value:,}"
