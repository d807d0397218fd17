"""The end of a recording: its cause, and whether the recording is complete."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.engines.artifacts import stalls_of
from stepscope.files.sidecar import Ended, Stall
from stepscope_vllm import _versions
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._files import engine_folder
from stepscope_vllm._files.traces import Trace

_SCHEDULES = ("wait_iterations", "warmup_iterations")
"""Settings by which an engine begins and ends recordings on its own."""


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
    """Return the cause of a trace's end.

    Args:
        recorded: Engine iterations in it, or None if it does not name them.
        asked: Number of iterations to record, or None for all until the end of the capture.
        early: True if the trace ended before stepscope stopped the engine.
        ran: Engine iterations in the capture, by the engine's own counter, or None if nothing counts them.
        expired: Reason why stepscope stopped the engine before the end of the capture, or None if it did not.
        certain: True if only a stop, or `asked`, can end this engine's recordings.
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
    """Return whether the workers counted no iteration; a recording that waits for an iteration then has no
    file.
    """
    counts = [worker.get("ran") for worker in reports]
    return bool(counts) and all(count == 0 for count in counts)


def iterations(recording: Recording, trace: Trace) -> int | None:
    """Return the number of engine iterations with a request in a trace, or None if the trace does not name
    them.
    """
    passes = _passes(recording, trace)
    return None if passes is None else passes - trace.empty


def _passes(recording: Recording, trace: Trace) -> int | None:
    """Return the number of engine iterations in a trace as vLLM counts them, including those without a
    request.
    """
    if trace.frontend or trace.is_recording:
        return None
    named = _versions.names_iterations(recording.target.version)
    return trace.iterations if named or trace.iterations else None


def ending(recording: Recording, trace: Trace) -> Ending:
    """Return the cause of a trace's end."""
    stop_ns = None if recording.started is None else recording.stop_ns
    if trace.frontend or trace.is_recording or stop_ns is None:
        return Ending(None, recording.expired, None)
    here = trace.window is not None and trace.host == socket.gethostname()
    before = trace.window is not None and trace.window[1] < stop_ns
    return ending_of(
        recorded=_passes(recording, trace),
        asked=recording.iterations_asked,
        early=before if here else recording.is_early,
        ran=_ran(recording, trace),
        expired=recording.expired,
        certain=_is_certain(recording),
    )


def stalls(recording: Recording, trace: Trace) -> tuple[Stall, ...]:
    """Return the times in which the engine served nothing because its profiler started or wrote this
    trace.
    """
    if trace.frontend:
        return ()
    stamped = [
        Stall(start_ns=start_ns, end_ns=end_ns, doing=doing, source="stamps")
        for worker in recording.target.reports
        if worker.get("pid") == trace.pid and worker.get("host") == trace.host
        for doing, start_ns, end_ns in worker.get("stalls", ())
    ]
    return stalls_of(trace.window, stamped, engine_folder.whole_ns(recording.changed_ns, trace.path.name))


def _is_certain(recording: Recording) -> bool:
    """Return whether only a stop, or the requested count, can end this engine's recordings."""
    started, settings = recording.started, {**recording.target.settings, **recording.capture.extra}
    scheduled = any(settings.get(name) for name in _SCHEDULES)
    return started is not None and (started.aimed or started.named) and not scheduled


def _ran(recording: Recording, trace: Trace) -> int | None:
    """Return the iterations during the capture, as counted by the worker, else by the server's metrics; None
    if unknown.
    """
    start = recording.capture.iterations.start
    for worker in recording.target.reports:
        if worker.get("pid") == trace.pid and isinstance(ran := worker.get("ran"), int):
            return max(ran - start, 0)
    if "url" not in recording.facts_at_stop:
        return None  # of engines in this process there may be several, whose numbers are one
    before, after = recording.facts_at_start.get("iterations"), recording.facts_at_stop.get("iterations")
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return None
    return max(int(after - before) - start, 0)
