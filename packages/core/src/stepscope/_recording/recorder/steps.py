"""Steps of the training loop in this process: their times and tokens, and the detection of slow steps.

Each step gets a line in `steps_<run>.jsonl`, a file of bounded size. Uncaptured steps shortly before and
after a captured step are also written to a separate file, by the exporter's thread.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.process import exports, failures, fork, shutdown
from stepscope._recording.session import activation
from stepscope._recording.spans import scopes, slot
from stepscope._recording.spans.span import Span
from stepscope.errors import ours
from stepscope.files import clock, switch
from stepscope.files.clock import ClockAnchor, duration
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending
from stepscope.files.spans import MOST_NAMES, OTHER_NAMES, STEP_TOKENS
from stepscope.files.steps import Stages, StepLine, UncapturedStep, alike, same_length
from stepscope.files.storage import append_lines, write_atomic
from stepscope.files.values import bounded

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

COMPARED = 50
"""Number of earlier steps that a step is compared with."""
ENOUGH = 3
"""Smallest number of earlier steps of the same kind. With fewer, a step is compared with steps of all
kinds."""
SHORTEST = 10
"""A step is first compared with the quantile 1/`SHORTEST` (0.1) of earlier durations. Only a step that is
much longer than this quantile is compared with steps of its own kind, which takes more time."""
FIRST = 10
"""Number of steps at the beginning that are never reported as slow, because the program warms up."""


class RecordedStep:
    """One uncaptured step, while it runs and afterwards."""

    __slots__ = ("after", "closed", "ending", "is_written", "number", "opened", "stages", "tokens")

    def __init__(self, number: int, after: int) -> None:
        self.number = number
        self.after = after
        """Number of the last span that opened before the step."""
        self.opened: ClockAnchor = clock.read_anchor()
        self.closed: ClockAnchor | None = None
        """Clock reading at the step's end, or None while the step runs."""
        self.ending: Ending | None = None
        """Cause of an early end, or None."""
        self.is_written = False
        """True if the step's folder is written or will be."""
        self.stages: dict[str, float] | None = None
        """{`role/stage`: seconds}, or None until they are computed."""
        self.tokens: dict[str, int] = {}
        """Tokens of the step, as counted by `step_tokens`."""

    @property
    def dur_ns(self) -> int:
        """Duration of the step; while it runs, until now."""
        closed = clock.read_anchor() if self.closed is None else self.closed
        return closed.mono_ns - self.opened.mono_ns


class Steps:
    """The last uncaptured steps of this process."""

    def __init__(self, keep: int) -> None:
        self._kept: deque[RecordedStep] = deque(maxlen=keep)
        self._before: deque[RecordedStep] = deque(maxlen=COMPARED)
        self._long: deque[RecordedStep] = deque(maxlen=COMPARED)
        """Steps that took longer than usual, some of which were reported as slow."""
        self._seen = 0

    @property
    def running(self) -> RecordedStep | None:
        """The running step, or None."""
        last = self._kept[-1] if self._kept else None
        return last if last is not None and last.closed is None else None

    @property
    def oldest_ns(self) -> int:
        """Start of the oldest kept step, or 0 if there is none."""
        return self._kept[0].opened.mono_ns if self._kept else 0

    def begin(self, number: int, after: int) -> RecordedStep:
        """Begin a step.

        Args:
            after: Number of the last span that opened before the step.
        """
        step = RecordedStep(number, after)
        self._kept.append(step)
        return step

    def end(self, step: RecordedStep, ending: Ending | None) -> None:
        step.closed, step.ending = clock.read_anchor(), ending

    def slowness(
        self, step: RecordedStep, factor: float, stages_of: Callable[[RecordedStep], Stages]
    ) -> str | None:
        """Compare an ended step with earlier steps of its kind, and add it to the steps for later
        comparisons.

        A step is not slow if an earlier long step of its kind took as long.

        Args:
            factor: `recorder.slow_factor` of the configuration.
            stages_of: Computes the stages of a step. Called only if the step took much longer than
                short earlier steps.

        Returns:
            The reason why the step is slow; None if it is not, or is one of the first `FIRST` steps.
        """
        before, self._seen, took_ns = list(self._before), self._seen + 1, step.dur_ns
        self._before.append(step)
        times_ns = sorted(other.dur_ns for other in before)
        if not times_ns or took_ns <= factor * times_ns[len(times_ns) // SHORTEST]:
            return None
        stages = stages_of(step)
        same = [other for other in before if other.stages is not None and alike(other.stages, stages)]
        compared = same if len(same) >= ENOUGH else before
        usual_ns = sorted(other.dur_ns for other in compared)[len(compared) // 2]
        if took_ns <= factor * usual_ns:
            return None
        is_known = any(
            same_length(other.dur_ns, took_ns, factor) and alike(other.stages or {}, stages)
            for other in self._long
        )
        self._long.append(step)
        if is_known or self._seen <= FIRST:
            return None
        times = f"{took_ns / usual_ns:.1f} times the median of {len(compared)} steps"
        return f"it took {duration(took_ns)}, {times} ({duration(usual_ns)})"

    def last(self, number: int, *, ended: bool = False) -> list[RecordedStep]:
        """Return the last steps, the oldest first.

        Args:
            ended: True to leave out the running step.
        """
        return [step for step in self._kept if not ended or step.closed is not None][-number:]


class StepTokens:
    """Tokens of the running step, as counted by `step_tokens` in this process. Thread-safe."""

    def __init__(self) -> None:
        self._counts: deque[Mapping[str, int]] = deque()

    def add(self, counts: Mapping[str, int]) -> None:
        self._counts.append(counts)

    def take(self) -> dict[str, int]:
        """Return the sums, and reset them."""
        sums: Counter[str] = Counter()
        while self._counts:
            sums.update(self._counts.popleft())
        return dict(sums)


MOST_BYTES = 4 << 20
"""Size in bytes above which the older half of the file is removed. About 20,000 steps remain."""


def stages_of(step: RecordedStep, spans: Sequence[Span]) -> dict[str, float]:
    """Return {`role/stage`: seconds} of the top-level spans of an ended step, without work of other steps.

    Args:
        spans: The spans that opened in the step, and perhaps other spans.
    """
    first_ns, last_ns = step.opened.mono_ns, step.opened.mono_ns + step.dur_ns
    took: dict[tuple[str, str], int] = defaultdict(int)
    """{(role, stage): ns}. Names are not converted to text, which would double the time."""
    for span in spans:
        above = span.parent
        if not first_ns <= span.start_ns <= last_ns or (above is not None and _is_in_a_span(above)):
            continue
        end_ns = span.end_ns
        if end_ns is None or scopes.inherited(span)[1] not in (None, step.number):
            continue
        role = span.role or scopes.role_at(above) or span.log.process.role
        try:
            took[role, span.stage] += end_ns - span.start_ns
        except TypeError:  # not hashable, such as a list
            took[str(role), str(span.stage)] += end_ns - span.start_ns
    return seconds_of(took)


def _is_in_a_span(scope: scopes.Scope | None) -> bool:
    """Return whether a scope is a span or a span's attached carrier, or is inside one of these."""
    while scope is not None:
        if scope.log is not None or scope.reference() is not None:
            return True
        scope = scope.parent
    return False


def seconds_of(took_ns: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return {`role/stage`: seconds} from {(role, stage): ns}."""
    stages: dict[str, int] = defaultdict(int)
    for (role, stage), ns in took_ns.items():
        if ns and stage != STEP_TOKENS:  # marks have no length
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
    """Return the longest stages, and the sum of the other stages as one stage. Names may contain ids, and
    lines must be short.
    """
    if len(stages) <= MOST_NAMES:
        return stages
    longest = heapq.nlargest(MOST_NAMES, stages, key=stages.__getitem__)
    kept = {stage: stages[stage] for stage in longest}
    return {**kept, OTHER_NAMES: sum(stages.values()) - sum(kept.values())}


def _means(sampler: Sampler, first_ns: int, last_ns: int) -> dict[str, float]:
    """Return {counter: mean over the step}. Counters of kind `total`, and counters without a sample in the
    step, are left out.
    """
    means = sampler.means(first_ns, last_ns)
    return {f"{series.name} {series.of}".strip(): mean for series, mean in means.items()}


def append(path: Path, line: StepLine) -> None:
    """Append the line of a step to a file. A disk error is recorded and not raised."""
    try:
        if append_lines(path, [line]) > MOST_BYTES:
            _halve(path)
    except ours(OSError) as error:
        failures.note("writing a line for each step", error)


def _halve(path: Path) -> None:
    kept = path.read_bytes()[-MOST_BYTES // 2 :]
    write_atomic(path, kept[kept.index(b"\n") + 1 :])


KEPT = 32
"""Number of steps before a captured step, and after it, that are written to `uncaptured/`."""
_WRITE_AT = (4, 16, KEPT)
"""Uncaptured steps are written when this number of steps has passed since a capture. So there are few writes,
and few steps are lost if the process is killed."""

_loops: dict[tuple[str, str], _Loop] = {}
"""{(folder, role): loop}, because a process may have several training loops."""


Began: TypeAlias = tuple[int, int]
"""A running uncaptured step: (start in monotonic ns, number of captures before)."""


class _Loop:
    """The uncaptured steps of one training loop."""

    def __init__(self) -> None:
        self._steps: deque[UncapturedStep] = deque(maxlen=KEPT)
        """Steps that are not written yet."""
        self._begun = False
        """True if a step of the loop has ended, captured or not."""
        self._file: Path | None = None
        self._since = KEPT
        """Number of steps since the last capture, at most `KEPT`."""

    def add(self, step: int, dur_ns: int) -> None:
        first, start_ns, warm_up = self._since == 0, time.time_ns() - dur_ns, not self._begun
        self._begun = True
        self._steps.append(
            UncapturedStep(step=step, start_ns=start_ns, dur_ns=dur_ns, first=first, warm_up=warm_up)
        )
        if self._since < KEPT:
            self._since += 1
            if self._since in _WRITE_AT:
                self._write()

    def captured(self, file: Path) -> None:
        self._file, self._since, self._begun = file, 0, True
        self._write()

    def flush(self) -> None:
        """Write the remaining steps after the last capture."""
        if self._since < KEPT:
            self._write()

    def _write(self) -> None:
        steps, self._steps = self._steps, deque(maxlen=KEPT)
        if steps and self._file is not None:
            exports.exporter().then(partial(_append, self._file, tuple(steps)), deferred=False)


def begin() -> Began | None:
    """Begin an uncaptured step. Return None during a capture, or if stepscope is off."""
    if switch.DISABLED or slot.session() is not None:
        return None
    return time.monotonic_ns(), activation.activations


def end(began: Began, *, step: int, save_path: str, role: str) -> None:
    """End an uncaptured step. If a capture overlapped the step, the step is discarded."""
    began_ns, captures = began
    dur_ns = time.monotonic_ns() - began_ns
    if captures == activation.activations:
        loop = _loops.get((save_path, role))
        if loop is None:
            loop = _loops[save_path, role] = _Loop()
        loop.add(step, dur_ns)


def captured(session: Session) -> None:
    """Record the end of a captured step. If each rank opens its own captures, only rank 0 writes uncaptured
    steps.
    """
    process, save_path = session.process, session.config.save_path
    if process.rank in (None, 0):
        loop = _loops.setdefault((save_path, process.role), _Loop())
        loop.captured(RunLayout(save_path).uncaptured(process, session.run_id))


def flush() -> None:
    """Queue the write of the remaining steps, before the exporter is drained at exit."""
    for loop in _loops.values():
        loop.flush()


def _append(file: Path, steps: tuple[UncapturedStep, ...]) -> None:
    try:
        append_lines(file, steps)
    except ours(OSError) as error:
        failures.note("writing how long uncaptured steps took", error)


shutdown.on_exit("the durations of uncaptured steps", lambda *_: flush(), order=10)
fork.forgets("step durations", _loops.clear)
