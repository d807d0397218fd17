"""Lines of `steps_<run>.jsonl`: one for each step of a run, in a file of bounded size."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.process import failures
from stepscope._recording.recorder.steps import RecordedStep
from stepscope._recording.spans import scopes
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files.recorder import StepLine
from stepscope.files.spans import MOST_NAMES, OTHER_NAMES, STEP_TOKENS
from stepscope.files.storage.atomic import append_lines, write_atomic
from stepscope.files.values import bounded

MOST_BYTES = 4 << 20
"""Size in bytes beyond which the older half of the file is removed: some 20,000 steps remain."""


def stages_of(step: RecordedStep, spans: Sequence[Span]) -> dict[str, float]:
    """Return {`role/stage`: seconds} of an ended step.

    Args:
        spans: The spans that opened in the step, and perhaps others.
    """
    first_ns, last_ns = step.opened.mono_ns, step.opened.mono_ns + step.dur_ns
    took: dict[tuple[str, str], int] = defaultdict(int)
    """{(role, stage): ns}, with the names as the user gave them: turning each into text would double the
    work."""
    for span in spans:
        above = span.parent
        if (above is not None and above.log is not None) or not first_ns <= span.start_ns <= last_ns:
            continue
        end_ns = span.end_ns
        if end_ns is None:
            continue
        role = span.role or scopes.role_at(above) or span.log.process.role
        try:
            took[role, span.stage] += end_ns - span.start_ns
        except TypeError:  # a list, say
            took[str(role), str(span.stage)] += end_ns - span.start_ns
    return seconds_of(took)


def seconds_of(took_ns: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return {`role/stage`: seconds} from times by role and stage."""
    stages: dict[str, int] = defaultdict(int)
    for (role, stage), ns in took_ns.items():
        if stage != STEP_TOKENS:
            stages[f"{bounded(str(role))}/{bounded(str(stage))}"] += ns
    return {stage: round(ns / 1e9, 6) for stage, ns in _few(stages).items()}


def line_of(step: RecordedStep, stages: dict[str, float], sampler: Sampler | None) -> StepLine:
    """Return the line of an ended step.

    Args:
        sampler: The sampler of the counters, or None.
    """
    first_ns, last_ns = step.opened.mono_ns, step.opened.mono_ns + step.dur_ns
    return StepLine(
        step=step.number,
        start_ns=step.opened.wall_ns,
        dur_ns=step.dur_ns,
        stages=stages,
        counters={} if sampler is None else _means(sampler, first_ns, last_ns),
        tokens=step.tokens,
        error=None if step.ending is None else step.ending.error,
    )


def _few(stages: Mapping[str, int]) -> Mapping[str, int]:
    """Return the longest stages and the sum of the others, because names may hold ids and the file is
    bounded.
    """
    if len(stages) <= MOST_NAMES:
        return stages
    longest = heapq.nlargest(MOST_NAMES, stages, key=stages.__getitem__)
    kept = {stage: stages[stage] for stage in longest}
    return {**kept, OTHER_NAMES: sum(stages.values()) - sum(kept.values())}


def _means(sampler: Sampler, first_ns: int, last_ns: int) -> dict[str, float]:
    """Return the means of counters, except totals, over the step. Empty for a step between two samples."""
    means = sampler.means(first_ns, last_ns)
    return {f"{series.name} {series.of}".strip(): mean for series, mean in means.items()}


def append(path: Path, line: StepLine) -> None:
    """Append a line to the file. A disk error is recorded and not raised."""
    try:
        if append_lines(path, [line]) > MOST_BYTES:
            _halve(path)
    except ours(OSError) as error:
        failures.note("writing a line for each step", error)


def _halve(path: Path) -> None:
    kept = path.read_bytes()[-MOST_BYTES // 2 :]
    write_atomic(path, kept[kept.index(b"\n") + 1 :])
