"""The end of a recording: its cause, and whether the recording has all that was asked for."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepscope.engines.artifacts import Option, stalls_of
from stepscope.files.sidecar import Ended, Stall
from stepscope_vllm._files import engine_folder
from stepscope_vllm._files.traces import Trace


class Ending(NamedTuple):
    """The end of one trace."""

    ended: Ended | None
    truncated: str | None
    note: str | None


def ending_of(
    *,
    recorded: int | None,
    asked: int | None,
    early: bool,
    ran: int | None,
    expired: str | None,
    certain: bool,
) -> Ending:
    """Return who ended a trace.

    Args:
        recorded: Engine iterations in it. None: it does not name them.
        asked: How many were to be recorded; None: all until the end of the capture.
        early: Whether it ended before our stop.
        ran: Engine iterations in the capture, by the engine's own counter. None: nothing counts them.
        expired: Reason why our stop came before the end of the capture; None: it did not.
        certain: Whether nothing but a stop or `asked` ends this engine's recordings.
    """
    if not early:
        note = None
        if asked is not None and recorded is not None and recorded < asked and expired is None:
            note = f"{recorded} of {asked} engine iterations: the engine ran no more"
        return Ending("capture" if expired is None else "budget", expired, note)
    if asked is not None and (recorded is None or recorded >= asked):
        return Ending(None if recorded is None else "count", None, None)
    if not certain:
        return Ending(None, expired, None)
    seen = "early" if recorded is None else f"after {recorded} engine iterations"
    wanted = "" if asked is None else f" of the {asked} asked for"
    event = f"somebody else stopped the engine's profiler {seen}{wanted}"
    if ran is None or recorded is None:
        return Ending("others", f"{event}; how many more it ran is not known", None)
    if ran <= recorded:
        return Ending("others", None, f"{event}; it ran no more")
    return Ending("others", f"{event}; it ran {ran - recorded} more", None)


def is_idle(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the workers counted no iteration. A recording that begins later has no file then."""
    counts = [worker.get("ran") for worker in reports]
    return bool(counts) and all(count == 0 for count in counts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one capture of an engine, from which each of its traces is judged."""

    start: int
    """Engine iterations that were to pass first."""
    asked: int | None
    """Engine iterations that were to be recorded. None: all until the end of the capture."""
    named: bool
    """This vLLM names iterations in its traces."""
    reports: Sequence[Mapping[str, Any]]
    """Reports of the workers after the stop (`WorkerExtension.stepscope_release`)."""
    before: Mapping[str, Option]
    """Facts of the engine at the start."""
    after: Mapping[str, Option]
    stopped_ns: int | None
    """Time of our stop; unix ns. None: there was none."""
    early: bool
    """A trace was there before our stop."""
    expired: str | None
    """Reason why our stop came before the end of the capture."""
    certain: bool
    """Nothing but a stop or `asked` ends this engine's recordings."""

    def iterations(self, trace: Trace) -> int | None:
        """Return the engine iterations in a trace; None if it does not name them."""
        if trace.frontend or trace.is_recording:
            return None
        return trace.iterations if self.named or trace.iterations else None

    def ending(self, trace: Trace) -> Ending:
        """Return who ended a trace."""
        if trace.frontend or trace.is_recording or self.stopped_ns is None:
            return Ending(None, self.expired, None)
        here = trace.window is not None and trace.host == socket.gethostname()
        before = trace.window is not None and trace.window[1] < self.stopped_ns
        return ending_of(
            recorded=self.iterations(trace),
            asked=self.asked,
            early=before if here else self.early,
            ran=self._ran(trace),
            expired=self.expired,
            certain=self.certain,
        )

    def stalls(self, trace: Trace, changed_ns: Mapping[str, int]) -> tuple[Stall, ...]:
        """Return the times at which the engine served nothing because of a trace.

        Args:
            changed_ns: `engine_folder.changed_ns` of the recording's files; unix ns.
        """
        stamped = [
            Stall(start_ns=start_ns, end_ns=end_ns, doing=doing, source="stamps")
            for worker in self.reports
            if worker.get("pid") == trace.pid and worker.get("host") == trace.host
            for doing, start_ns, end_ns in worker.get("stalls", ())
        ]
        return stalls_of(trace.window, stamped, engine_folder.whole_ns(changed_ns, trace.path.name))

    def _ran(self, trace: Trace) -> int | None:
        """Return the iterations in the capture, as counted by the worker, or else by the server's metrics."""
        for worker in self.reports:
            if worker.get("pid") == trace.pid and isinstance(ran := worker.get("ran"), int):
                return max(ran - self.start, 0)
        before, after = self.before.get("iterations"), self.after.get("iterations")
        if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
            return None
        if "url" not in self.after:
            return None  # of engines in this process there may be several, whose numbers are one
        return max(int(after - before) - self.start, 0)
