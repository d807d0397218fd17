"""Results of a part: comparisons with independent sources, figures and notes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

BUSY_MS = 500.0
"""Allowed difference of times with `--pretend`: on a busy CPU, a process may wait between two readings."""
State = Literal["running", "passed", "failed", "late", "absent"]


@dataclass
class Check:
    """One comparison of stepscope's value with the value of an independent source."""

    what: str
    ours: str
    theirs: str
    source: str
    agrees: bool


@dataclass
class Goal:
    """A measured time and its limit. A missed goal does not fail the part, since the machine may be busy."""

    what: str
    value: float
    limit: float
    judged: bool
    """False with `--pretend`."""

    def __str__(self) -> str:
        met = ("met" if self.value <= self.limit else "MISSED") if self.judged else "not judged"
        return f"{met}: {self.what}: {self.value:.3f}, goal <= {self.limit:g}"


@dataclass
class Result:
    """The result of one part, with the fields of `gpu.json`."""

    name: str
    title: str
    state: State = "running"
    seconds: float = 0.0
    limit_s: float = 0.0
    on_a_gpu: bool = False
    checks: list[Check] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.state not in ("passed", "absent")

    @property
    def sources(self) -> list[str]:
        """Return the independent sources that agreed in at least one check."""
        return list(dict.fromkeys(check.source for check in self.checks if check.agrees))


class Record:
    """The result of the part in this process, written to its file after each addition."""

    def __init__(self, file: Path, result: Result) -> None:
        self.result = result
        self._file = file
        self.write()

    def check(self, what: str, ours: object, theirs: object, *, source: str, agrees: bool) -> None:
        self.result.checks.append(Check(what, str(ours), str(theirs), source, bool(agrees)))
        self.write()

    def equal(self, what: str, ours: object, theirs: object, *, source: str) -> None:
        self.check(what, ours, theirs, source=source, agrees=ours == theirs)

    def near(
        self,
        what: str,
        ours: float,
        theirs: float,
        *,
        unit: str,
        source: str,
        within: float,
        beyond: float = 0.0,
    ) -> None:
        """Compare two numbers.

        Args:
            within: Allowed difference, as a share of the independent value.
            beyond: Further allowed difference, in `unit`.
        """
        if unit == "ms" and not self.result.on_a_gpu:
            beyond += BUSY_MS
        agrees = abs(ours - theirs) <= within * abs(theirs) + beyond
        shown = [f"{value:,.3f} {unit}".strip() for value in (ours, theirs)]
        self.check(what, *shown, source=source, agrees=agrees)

    def goal(self, what: str, value: float, limit: float) -> None:
        self.result.goals.append(Goal(what, value, limit, self.result.on_a_gpu))
        self.write()

    def figure(self, name: str, value: object) -> None:
        self.result.figures[name] = f"{value:,.3f}" if isinstance(value, float) else str(value)
        self.write()

    def note(self, text: str) -> None:
        self.result.notes.append(text)
        self.write()

    def absent(self, reason: str) -> None:
        """Mark the part as absent, which is not a failure: the machine lacks something that it needs."""
        self.result.state = "absent"
        self.note(reason)

    def write(self) -> None:
        passing = self._file.with_suffix(".part")
        passing.write_text(json.dumps(asdict(self.result)))
        passing.replace(self._file)


def read_result(file: Path) -> Result:
    """Return the result that a part wrote.

    Raises:
        OSError, ValueError: the file does not exist or is incomplete.
    """
    fields = json.loads(file.read_text())
    checks = [Check(**check) for check in fields.pop("checks")]
    goals = [Goal(**goal) for goal in fields.pop("goals")]
    return Result(**fields, checks=checks, goals=goals)
