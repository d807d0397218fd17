"""Steps of the loop in this process: their bounds, their tokens, and whether one took unusually long."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from stepscope._recording.process import clock
from stepscope.files.clock import ClockAnchor
from stepscope.files.kinds import Stages, alike, same_length
from stepscope.files.manifest.records import Ending

COMPARED = 50
"""Number of steps whose median a step is compared with."""
ENOUGH = 3
"""Least number of earlier steps of the same kind; with fewer, a step is compared with all steps."""
SHORTEST = 10
"""A step is examined if it is long compared with the shortest tenth, which may be a kind of its own."""
FIRST = 10
"""Number of steps at the beginning that are never called slow, because they warm up."""


class RecordedStep:
    """One step, while it runs and afterwards."""

    __slots__ = ("after", "closed", "ending", "is_written", "number", "opened", "stages", "tokens")

    def __init__(self, number: int, after: int) -> None:
        self.number = number
        self.after = after
        """The number of the last span before the step."""
        self.opened: ClockAnchor = clock.read_anchor()
        self.closed: ClockAnchor | None = None
        """Clock reading at the step's end, or None while the step runs."""
        self.ending: Ending | None = None
        """The cause of the step's early end, or None."""
        self.is_written = False
        """True if the step's folder is written, or about to be."""
        self.stages: dict[str, float] | None = None
        """{`role/stage`: seconds}, or None until they are summed."""
        self.tokens: dict[str, int] = {}
        """Tokens counted in the step by `step_tokens`."""

    @property
    def dur_ns(self) -> int:
        """Duration of the step, up to now while it runs."""
        closed = clock.read_anchor() if self.closed is None else self.closed
        return closed.mono_ns - self.opened.mono_ns


class Steps:
    """The last steps of the loop that were not captured."""

    def __init__(self, keep: int) -> None:
        self._kept: deque[RecordedStep] = deque(maxlen=keep)
        self._before: deque[RecordedStep] = deque(maxlen=COMPARED)
        self._long: deque[RecordedStep] = deque(maxlen=COMPARED)
        """Steps that were longer than usual, of which some were called slow."""
        self._seen = 0

    @property
    def running(self) -> RecordedStep | None:
        """The step that has begun and not ended, or None."""
        last = self._kept[-1] if self._kept else None
        return last if last is not None and last.closed is None else None

    @property
    def oldest_ns(self) -> int:
        """Start of the oldest kept step, or 0 if there is none."""
        return self._kept[0].opened.mono_ns if self._kept else 0

    def begin(self, number: int, after: int) -> RecordedStep:
        """Begin a step. `after` is the number of the last span before it."""
        step = RecordedStep(number, after)
        self._kept.append(step)
        return step

    def end(self, step: RecordedStep, ending: Ending | None) -> None:
        step.closed, step.ending = clock.read_anchor(), ending

    def slowness(
        self, step: RecordedStep, factor: float, stages_of: Callable[[RecordedStep], Stages]
    ) -> str | None:
        """Compare an ended step with earlier steps of its kind, and add it to these.

        A step is not called slow if an earlier long step of its kind took as long.

        Args:
            stages_of: Sums the stages of a step. Called only for a step that is longer than others.

        Returns:
            The reason why the step is slow, or None if it is not.
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
        took, usual = took_ns / 1e9, usual_ns / 1e9
        times = f"{took / usual:.1f} times the median of {len(compared)} steps"
        return f"it took {took:.3g} s, {times} ({usual:.3g} s)"

    def last(self, number: int, *, ended: bool = False) -> list[RecordedStep]:
        """Return the last steps, the oldest first.

        Args:
            ended: True to leave out the running step.
        """
        return [step for step in self._kept if not ended or step.closed is not None][-number:]


class StepTokens:
    """Tokens of the running step, as counted by `step_tokens` in this process. Any thread may add."""

    def __init__(self) -> None:
        self._counts: deque[Mapping[str, int]] = deque()

    def add(self, counts: Mapping[str, int]) -> None:
        self._counts.append(counts)

    def take(self) -> dict[str, int]:
        """Return the sums, and start again from zero."""
        sums: Counter[str] = Counter()
        while self._counts:
            sums.update(self._counts.popleft())
        return dict(sums)
