"""One run of a program or shell command, in a session of its own: with a deadline, its output kept, killed
with its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path


class Command:
    """Run once. `kill` may come from any thread, before it, while it runs and after it."""

    def __init__(
        self, what: str | Sequence[str], *, environ: Mapping[str, str], log: Path, timeout_s: float
    ) -> None:
        """`what`: a text for the shell, or a program and its arguments."""
        self._what = what
        self._environ = environ
        self._log = log
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: str | None = None
        self._lock = threading.RLock()  # a signal handler may kill

    def run(self) -> str | None:
        """Reason of its failure; None if it exited with 0. Its output is appended to the log."""
        with self._lock:
            if self._killed is not None:
                return self._killed
            process = self._process = self._start()
        return self._outcome(process)

    def kill(self, reason: str) -> None:
        """End the program and its children, except those that left its session."""
        with self._lock:
            if self._process is not None and self._process.returncode is not None:
                return
            self._killed = self._killed or reason
            if self._process is not None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    return  # it ended just now

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
    """Return the command line that calls `main(*arguments)` of `module`, of this Python and installation.

    The program yields the processor to the training. The working directory is not searched for modules: it is
    the training's, and holds what the training likes.
    """
    specs = filter(None, map(find_spec, ("stepscope", "stepscope_report")))
    homes = [str(Path(spec.origin).parents[1]) for spec in specs if spec.origin]
    program = (
        "import os, sys; sys.path[:] = [at for at in sys.path if at]; "
        f"sys.path.extend({homes!r}); os.nice(10); "
        f"from {module} import main; sys.exit(main(*sys.argv[1:]))"
    )
    return [sys.executable, "-c", program, *arguments]
