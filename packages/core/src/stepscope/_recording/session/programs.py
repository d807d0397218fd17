"""Separate programs after one capture: the user's command, and the program that computes figures.

The work takes long, imports much and may crash, so it does not run in the training's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from stepscope._recording.process import failures
from stepscope._recording.process.failures import describe
from stepscope.errors import ours
from stepscope.files.manifest import Expectation, State
from stepscope.files.scalars import StepScalars, read_scalars

if TYPE_CHECKING:
    from stepscope._recording.session.session import Session

REPORT_ABSENT = "stepscope-report is not installed. Fix: pip install 'stepscope[cli]'"


def is_report_absent() -> bool:
    """Return whether stepscope-report is missing. A training worker does not need this package."""
    return find_spec("stepscope_report") is None


class Command:
    """A command that runs once. `kill` may be called from any thread, before, during and after the run."""

    def __init__(
        self, what: str | Sequence[str], *, environ: Mapping[str, str], log: Path, timeout_s: float
    ) -> None:
        """
        Args:
            what: A text for the shell, or a program and its arguments.
        """
        self._what = what
        self._environ = environ
        self._log = log
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: str | None = None
        self._lock = threading.RLock()  # reentrant, because a signal handler may call kill()

    def run(self) -> str | None:
        """Run the command. Return None if the command exited with 0, else the reason of the failure. Append
        the output to the log.
        """
        with self._lock:
            if self._killed is not None:
                return self._killed
            process = self._process = self._start()
        return self._outcome(process)

    def kill(self, reason: str) -> None:
        """Kill the program and its children, except children that left its process group."""
        with self._lock:
            if self._process is not None and self._process.returncode is not None:
                return
            self._killed = self._killed or reason
            if self._process is not None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    return  # it has ended

    def _outcome(self, process: subprocess.Popen[bytes]) -> str | None:
        try:
            code = process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self.kill(f"timeout: killed after {self._timeout_s:g} s")
            code = process.wait()
        if self._killed is not None:
            return self._killed
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        return f"{how}; see {self._log.name}" if code else None

    def _start(self) -> subprocess.Popen[bytes]:
        handle = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(handle, "ab") as log:
            return subprocess.Popen(
                self._what,
                shell=isinstance(self._what, str),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )


def of_our_own(module: str, *arguments: str) -> list[str]:
    """Return the command line that calls `main(*arguments)` of `module` in this Python installation.

    The program has a low CPU priority. Modules are not searched in the working directory, which has the
    training's files.
    """
    specs = filter(None, map(find_spec, ("stepscope", "stepscope_report")))
    homes = [str(Path(spec.origin).parents[1]) for spec in specs if spec.origin]
    program = (
        "import os, sys; sys.path[:] = [at for at in sys.path if at]; "
        f"sys.path.extend({homes!r}); os.nice(10); "
        f"from {module} import main; sys.exit(main(*sys.argv[1:]))"
    )
    return [sys.executable, "-c", program, *arguments]


COMMAND, SCALARS = "finish command", "scalars"
"""Names of the two programs in the manifest."""
POLL_S = 0.5
"""Interval between two reads of the other processes' parts of the manifest."""


class ClosedCapture(Protocol):
    """A closed capture, with the attributes that the work after it needs."""

    @property
    def apart(self) -> list[str]:
        """Names of the workers whose files are fetched because their hosts do not share the folder."""
        ...

    def await_others(self, left_s: Callable[[], float], pause: Callable[[], object], *, drain: bool) -> None:
        """Wait until other processes have written their files, and fetch the files of the workers in `apart`.

        Args:
            left_s: Returns the remaining time in s. The wait ends when no time is left.
            pause: Called between two checks.
            drain: True to make the workers write deferred files now.
        """
        ...

    def fold(self) -> None:
        """Write `manifest.json` again."""
        ...


class Chore(NamedTuple):
    """One program to run after a capture."""

    name: str
    """The name in the manifest."""
    command: Command
    outcome: Callable[[str | None], str | None]
    """Called with the reason why the program failed, or None if it succeeded. Returns the reason for the
    manifest, or None."""


class Chores:
    """The programs to run after one capture."""

    def __init__(self, session: Session, result: ClosedCapture, tell: Callable[[StepScalars], None]) -> None:
        """
        Args:
            tell: Called with the figures once they are computed.
        """
        self._tell = tell
        self._result = result
        self._session = session
        self._over = threading.Event()
        self._files_until = time.monotonic() + session.config.budget.export_seconds
        self._chores = [
            chore for chore in self._all() if session.manifest_part.state(chore.name) == "pending"
        ]
        self.step = session.step
        self.longest_s = session.config.finish.timeout_s * len(self._chores)

    def _all(self) -> list[Chore]:
        session, finish = self._session, self._session.config.finish
        writers = ",".join(finish.report_to)
        figures = of_our_own(
            "stepscope_report.writers",
            session.config.save_path,
            str(session.step),
            session.run_id,
            writers,
        )
        return [
            Chore(COMMAND, self._program(finish.command or ""), lambda reason: reason),
            Chore(SCALARS, self._program(figures, _wandb_run()), self._figures),
        ]

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

    def _do(self, chore: Chore) -> None:
        try:
            absent = chore.name == SCALARS and is_report_absent()
            reason = REPORT_ABSENT if absent else chore.outcome(chore.command.run())
        except ours() as error:
            reason = describe(error)
        self._say(chore.name, reason)

    def _say(self, name: str, reason: str | None) -> None:
        manifest_part = self._session.manifest_part
        state: State = "failed" if reason else "ok"
        manifest_part.expect(Expectation(name=name, kind="after", state=state, reason=reason))
        manifest_part.write()
        if reason == REPORT_ABSENT:
            failures.warn_once(f"no figures of captured steps: {reason}")
        elif reason:
            failures.warn("stepscope: step %d: %s: failed: %s", self._session.step, name, reason)
        self._result.fold()

    def _figures(self, reason: str | None) -> str | None:
        """Read the computed figures and pass them to `tell`. Return the failures of writers, else
        `reason`.
        """
        session = self._session
        try:
            scalars = read_scalars(session.layout, session.run_id)
        except ours(OSError, ValueError):
            return reason or "the figures were not written"
        self._tell(scalars)
        failed = [f"{name}: {why}" for name, why in scalars.written.items() if why is not None]
        return "; ".join(failed) or reason

    def hurry(self, seconds: float) -> None:
        """Wait at most `seconds` from now for files of other processes."""
        self._files_until = min(self._files_until, time.monotonic() + seconds)

    def give_up(self, reason: str) -> None:
        for chore in self._chores:
            chore.command.kill(reason)
        self._over.set()

    def _wait_for_files(self) -> None:
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
    """Return environment variables with which W&B continues this process' open run; empty if there is
    none.
    """
    try:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return {}
        mode = "disabled" if run.disabled else "offline" if run.offline else None
        return {"WANDB_RUN_ID": str(run.id)} | ({} if mode is None else {"WANDB_MODE": mode})
    except ours() as error:
        failures.note("reading the training's run of W&B", error)
        return {}
