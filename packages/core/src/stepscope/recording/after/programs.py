"""Separate programs after one capture: the user's command, figures for curves, the mirror.

Their work takes long, imports much and may crash, so it stays out of the training's process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from socket import gethostname
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stepscope.errors import ours
from stepscope.files.manifest.records import Expectation, State
from stepscope.files.mirror import record_of, uncopied
from stepscope.files.scalars import StepScalars, read_scalars
from stepscope.recording.after.command import Command, of_our_own
from stepscope.recording.process import failures
from stepscope.recording.process.failures import describe

if TYPE_CHECKING:
    from stepscope.recording.session.session import Session

COMMAND, SCALARS, MIRROR = "finish command", "scalars", "mirror"
"""Their names in the manifest."""
POLL_S = 0.5
"""Interval between two looks at the other processes' parts of the manifest."""


class ClosedCapture(Protocol):
    """A closed capture, as far as the work after it needs it."""

    @property
    def apart(self) -> list[str]:
        """Workers whose files are fetched."""
        ...

    def await_others(self, left_s: Callable[[], float], pause: Callable[[], object], *, drain: bool) -> None:
        """Wait until the other processes have written their files, and fetch those of workers that are apart.

        Args:
            pause: Called between two looks.
            drain: Let workers write deferred files now.
        """
        ...

    def fold(self) -> None:
        """Write `manifest.json` anew."""
        ...


class Chore(NamedTuple):
    """One task of a separate program after a capture."""

    name: str
    """In the manifest."""
    command: Command
    outcome: Callable[[str | None], str | None]
    """(why the program failed, or None) -> why the chore did."""


class Chores:
    """Work of separate programs after one capture: the user's command, the figures, the mirror."""

    def __init__(
        self, session: Session, result: ClosedCapture | None, tell: Callable[[StepScalars], None]
    ) -> None:
        """Args:
        result: Of the capture; None in a worker, which sends its own host's files and no more.
        tell: Called with the figures, once they are there.
        """
        self._tell = tell
        self._result = result
        self._session = session
        self._over = threading.Event()
        self._files_until = time.monotonic() + session.config.budget.export_seconds
        self._chores = [
            chore for chore in self._all() if session.manifest_part.state(chore.name) == "pending"
        ]
        # Once more at the end, for the manifest that says that the first time went well.
        self._last = self._mirror(earlier=False)
        self._mirrors = session.manifest_part.state(MIRROR) == "pending"
        self.step = session.step
        self.longest_s = session.config.finish.timeout_s * (len(self._chores) + self._mirrors)

    def _all(self) -> list[Chore]:
        """Run the programs in order: the mirror comes last, so it also gets the command's files and the
        outcomes.
        """
        session, finish = self._session, self._session.config.finish
        writers = ",".join(finish.report_to)
        figures = of_our_own(
            "stepscope.writers.publish",
            session.config.save_path,
            str(session.step),
            session.run_id,
            writers,
        )
        return [
            Chore(COMMAND, self._program(finish.command or ""), lambda reason: reason),
            Chore(SCALARS, self._program(figures, _wandb_run()), self._figures),
            Chore(MIRROR, self._mirror(earlier=True), self._mirrored),
        ]

    def _mirror(self, *, earlier: bool) -> Command:
        config, step = self._session.config, str(self._session.step)
        scope = "yes" if earlier else "no"
        url = config.finish.mirror or ""
        return self._program(of_our_own("stepscope.mirror.program", config.save_path, step, url, scope))

    def _program(self, what: str | Sequence[str], variables: Mapping[str, str] = {}) -> Command:
        session = self._session
        log = session.layout.finish_log_of(session.process, session.run_id, session.number)
        environ = {**_environ(session), **variables}
        return Command(what, environ=environ, log=log, timeout_s=session.config.finish.timeout_s)

    def __call__(self) -> None:
        try:
            self._wait_for_files()
        except ours() as error:
            failures.note("waiting for files of other processes", error)
        for chore in self._chores:
            self._do(chore)
        if self._mirrors and self._session.manifest_part.state(MIRROR) == "ok":
            reason = self._last.run()
            if reason is not None:
                self._say(MIRROR, f"the copy of the manifest is out of date: {self._mirrored(reason)}")

    def _do(self, chore: Chore) -> None:
        try:
            reason = chore.outcome(chore.command.run())
        except ours() as error:
            reason = describe(error)
        self._say(chore.name, reason)

    def _say(self, name: str, reason: str | None) -> None:
        manifest_part = self._session.manifest_part
        state: State = "failed" if reason else "ok"
        manifest_part.expect(Expectation(name=name, kind="after", state=state, reason=reason))
        manifest_part.write()
        if reason:
            failures.warn("stepscope: step %d: %s: failed: %s", self._session.step, name, reason)
        if self._result is not None:
            self._result.fold()

    def _figures(self, reason: str | None) -> str | None:
        """Pass the figures on, and return the failures of writers, or else `reason`."""
        session = self._session
        try:
            scalars = read_scalars(session.layout, session.run_id)
        except ours(OSError, ValueError):
            return reason or "the figures were not written"
        self._tell(scalars)
        failed = [f"{name}: {why}" for name, why in scalars.written.items() if why is not None]
        return "; ".join(failed) or reason

    def _mirrored(self, reason: str | None) -> str | None:
        """Return the reason why the step's copy is not whole, from the record of copied files."""
        layout, host, url = self._session.layout, gethostname(), self._session.config.finish.mirror or ""
        if reason is None or not uncopied(layout, host, url):
            return None  # the time may have run out for earlier steps
        failed = record_of(layout, host, url).failed
        name, why = next(iter(failed.items()), (None, None))
        return reason if name is None else f"{reason}; {len(failed)} file(s) are not there, {name}: {why}"

    def hurry(self, seconds: float) -> None:
        """Limit the wait for other processes' files to `seconds` from now."""
        self._files_until = min(self._files_until, time.monotonic() + seconds)

    def give_up(self, reason: str) -> None:
        for command in (*(chore.command for chore in self._chores), self._last):
            command.kill(reason)
        self._over.set()

    def _wait_for_files(self) -> None:
        if self._result is not None:  # a worker answers for its own files alone
            drain = self._session.config.export.when == "deferred"
            self._result.await_others(self._left_s, partial(self._over.wait, POLL_S), drain=drain)

    def _left_s(self) -> float:
        return 0 if self._over.is_set() else self._files_until - time.monotonic()


def _environ(session: Session) -> dict[str, str]:
    process = session.process
    known = {
        "STEPSCOPE_SAVE_PATH": os.path.abspath(session.config.save_path),
        "STEPSCOPE_STEP": str(session.step),
        "STEPSCOPE_STEP_PATH": os.path.abspath(session.layout.root),
        "STEPSCOPE_RUN_ID": session.run_id,
        "STEPSCOPE_ROLE": process.role,
        "STEPSCOPE_PID": str(process.pid),
    }
    others = {name: value for name, value in os.environ.items() if name != "STEPSCOPE_RANK"}
    return others | known | ({} if process.rank is None else {"STEPSCOPE_RANK": str(process.rank)})


def _wandb_run() -> dict[str, str]:
    """Return W&B's variables for the run in which this process logs, if it has one open."""
    try:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return {}
        mode = "disabled" if run.disabled else "offline" if run.offline else None
        return {"WANDB_RUN_ID": str(run.id)} | ({} if mode is None else {"WANDB_MODE": mode})
    except ours() as error:
        failures.note("reading the training's run of W&B", error)
        return {}
