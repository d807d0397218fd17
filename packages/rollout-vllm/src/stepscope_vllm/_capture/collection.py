"""Collection of a recording's files: find them, move them, and publish them with ranks and sidecars."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option, publish, stalls_of
from stepscope.engines.passes import publish_passes
from stepscope.errors import EngineError
from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest import IDLE
from stepscope.files.sidecar import Artifact, Ended, Stall
from stepscope_vllm import _versions
from stepscope_vllm._driving import ascend_profiler
from stepscope_vllm._driving.target import PASSES_NEEDED, Started, Target, between, steady
from stepscope_vllm._files import engine_folder, traces
from stepscope_vllm._files.traces import Layout, Trace

_SCHEDULES = ("wait_iterations", "warmup_iterations")
"""Settings by which an engine begins and ends recordings on its own."""


class Ending(NamedTuple):
    """Cause of one trace's end, as the fields of `Artifact` with the same names."""

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
        recorded: Number of engine iterations in the trace, or None if the trace does not name iterations.
        asked: Number of iterations to record, or None for all until the end of the capture.
        early: True if the trace ended before stepscope stopped the profiler.
        ran: Number of engine iterations during the capture by the engine's own counter, or None if unknown.
        expired: Reason why stepscope stopped the profiler before the end of the capture, or None.
        certain: True if a recording of this engine ends only by a stop or after `asked` iterations.
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
    """Return whether all workers report that they ran no iteration. A recording without files is then
    complete.
    """
    counts = [worker.get("ran") for worker in reports]
    return bool(counts) and all(count == 0 for count in counts)


def iterations(recording: Recording, trace: Trace) -> int | None:
    """Return the number of engine iterations with a request in a trace, or None if the trace does not name
    iterations.
    """
    passes = _passes(recording, trace)
    return None if passes is None else passes - trace.empty


def _passes(recording: Recording, trace: Trace) -> int | None:
    """Return the number of engine iterations in a trace as vLLM counts, including iterations without a
    request. None if the trace does not name iterations.
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
    """Return True if this engine's recordings end only by a stop or at the requested count."""
    started, settings = recording.started, {**recording.target.settings, **recording.capture.extra}
    scheduled = any(settings.get(name) for name in _SCHEDULES)
    return started is not None and (started.aimed or started.named) and not scheduled


def _ran(recording: Recording, trace: Trace) -> int | None:
    """Return the number of iterations during the capture by the worker's count, else by the server's metrics;
    None if unknown.
    """
    start = recording.capture.iterations.start
    for worker in recording.target.reports:
        if worker.get("pid") == trace.pid and isinstance(ran := worker.get("ran"), int):
            return max(ran - start, 0)
    if "url" not in recording.facts_at_stop:
        return None  # the metrics of this process may be the sum of several engines
    before, after = recording.facts_at_start.get("iterations"), recording.facts_at_stop.get("iterations")
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return None
    return max(int(after - before) - start, 0)


@dataclass(kw_only=True)
class Recording:
    """State of one recording. Only the session changes the state; code that publishes files reads it."""

    target: Target
    capture: EngineCapture
    ignored: dict[str, str]
    """{option without effect, or missing part: reason}"""
    started: Started | None = None
    """Facts about the start, or None before the recording has begun."""
    files_before: set[str] = field(default_factory=set)
    """Names of the files before the start, in the engine's folder and in the capture's folder."""
    files_at_start: set[str] = field(default_factory=set)
    """Names of the files in the engine's folder after the start."""
    opened: ClockAnchor | None = None
    closed: ClockAnchor | None = None
    facts_at_start: Mapping[str, Option] = field(default_factory=dict)
    facts_at_stop: Mapping[str, Option] = field(default_factory=dict)
    expired: str | None = None
    """Reason why stepscope stopped the profiler before the end of the capture, or None."""
    stop_ns: int | None = None
    """Time at which stepscope stopped the profiler, in unix ns, or None."""
    is_early: bool = False
    """True if a trace existed before stepscope stopped the profiler."""
    changed_ns: Mapping[str, int] = field(default_factory=dict)
    """Result of `engine_folder.changed_ns`: the times at which the files were complete."""

    @property
    def prefix(self) -> str:
        """Return the prefix of the file names of this recording."""
        return engine_folder.prefix_of(self.capture.name)

    @property
    def local_ranks(self) -> list[int] | None:
        """Return the wanted ranks in the engine's own numbering, or None for all."""
        return traces.local_ranks(self.capture.ranks, self.target.layout, self.capture.replica)

    @property
    def iterations_asked(self) -> int | None:
        """Return the number of iterations to record, or None for all until the end of the capture."""
        return None if "iterations" in self.ignored else self.capture.iterations.count

    def is_named(self, name: str) -> bool:
        """Return whether the name of a file begins with the prefix of this recording."""
        return name.startswith(f"{self.prefix}_")

    def workers_expected(self, layout: Layout) -> int:
        """Return the number of workers that should write a file. With stepscope's extension, workers of
        unwanted ranks write none.
        """
        local = self.local_ranks
        if self.started is None or not self.started.aimed or local is None:
            return layout.size
        return len(local) * layout.dp


def collect(recording: Recording, late: Recording | None) -> list[Artifact]:
    """Publish the files of a recording that has ended.

    Args:
        late: The previous recording of the engine, if no file of it was published; else None. Files that were
            written before the new recording began belong to `late`.

    Raises:
        EngineError: the recording did not begin, or its traces are missing or incomplete.
    """
    started = recording.started
    if started is None:
        raise EngineError("the capture did not begin")
    if started.by_others or not recording.capture.profiler:
        return []
    files = files_of(recording, started, late)
    if not any(map(engine_folder.is_trace, files)) and is_idle(recording.target.reports):
        recording.ignored[IDLE] = "the engine ran no iteration during the capture"
        return []
    _expect_complete(started.folder, files)
    recording.changed_ns = engine_folder.changed_ns(started.folder, files)
    return publish_traces(recording, _at_home(recording, started, files))


def publish_passes_of(recording: Recording) -> list[Artifact]:
    """Publish the notes of the engine's passes."""
    if not recording.capture.passes:
        return []
    files = recording.target.take_passes()
    if not files and not recording.capture.profiler:
        remove(recording)  # a server without stepscope's plugin has written empty traces
        raise EngineError(f"the engine noted no passes. {PASSES_NEEDED}")
    if not files:
        recording.ignored.setdefault("passes", f"the engine noted no passes. {PASSES_NEEDED}")
    artifacts = [one for file in files for one in publish_passes(file, recording.capture)]
    if not artifacts and not recording.capture.profiler:
        recording.ignored[IDLE] = "the engine ran no forward pass during the capture"
    return artifacts


def files_of(recording: Recording, started: Started, late: Recording | None) -> set[str]:
    """Return the names of a recording's files in the engine's folder. Publish the files that belong to
    `late`.
    """
    present = engine_folder.listed(started.folder)
    named = {name for name in present - recording.files_before if recording.is_named(name)}
    if started.aimed:
        return named
    if started.named and not any(map(engine_folder.is_recording, present)):
        return named
    # A worker finishes a stop before the next start. So files that appear during the start belong to `late`.
    between = recording.files_at_start - recording.files_before if late is not None else set()
    if late is not None and between:
        adopt(late, between, started.folder)
    return present - recording.files_before - between


def has_ended(recording: Recording) -> bool:
    """Return whether the engine has already written a trace of this recording."""
    started = recording.started
    if started is None or not (started.aimed or started.named):
        return False  # nothing distinguishes this recording's files from late files of another
    new = engine_folder.listed(started.folder) - recording.files_before
    return any(engine_folder.is_trace(name) and recording.is_named(name) for name in new)


def remove(recording: Recording) -> None:
    """Remove the files of a recording whose caller has given up."""
    if recording.started is not None:
        for name in files_of(recording, recording.started, None):
            engine_folder.remove(recording.started.folder / name)


def _expect_complete(folder: Path, files: set[str]) -> None:
    paths = [folder / name for name in files if engine_folder.is_trace(name)]
    if not paths:
        raise EngineError(
            f"vLLM reported success and wrote no trace to {folder}: its workers only log what "
            "goes wrong. Fix: look for 'Failed to stop profiler' in their logs; is there space, and is "
            "this folder seen by them and by this process?"
        )
    try:
        traces.wait_until_complete(paths)
    except ValueError as error:
        raise EngineError(f"{error}; its worker stopped writing") from error


def _at_home(recording: Recording, started: Started, files: set[str]) -> Sequence[Path]:
    """Move the files to the capture's folder, except files that the workers wrote there. Return the paths of
    the traces.
    """
    home, folder = Path(recording.capture.out_dir), recording.target.folder
    if not started.aimed:
        moved = engine_folder.move(files, started.folder, home, recording.prefix)
        return [path for path in moved if engine_folder.is_trace(path.name)]
    paths = [started.folder / name for name in files if engine_folder.is_trace(name)]
    if folder is not None:  # the AsyncLLM's own profiler always writes to the engine's folder
        own = engine_folder.of_frontends(folder) - recording.files_before
        traces.wait_until_complete(folder / name for name in own)
        paths += engine_folder.move(own, folder, home, recording.prefix)
    return paths


def publish_traces(recording: Recording, paths: Sequence[Path]) -> list[Artifact]:
    """Write a sidecar beside each trace, and return the artifacts. Remove traces of ranks that the capture
    does not want.
    """
    capture, layout = recording.capture, recording.target.layout
    written = [traces.read(path) for path in paths]
    _note_contradictions(recording, written)
    placed = [(trace, traces.global_rank(trace, layout, capture.replica)) for trace in written]
    wanted = None if capture.ranks is None else {None, *capture.ranks}  # keep traces of unknown rank
    unwanted = [pair for pair in placed if wanted is not None and pair[1] not in wanted]
    for trace, _ in unwanted:
        engine_folder.remove(trace.path)
    kept = [pair for pair in placed if pair not in unwanted]
    ascend = _ascend_options(recording, [trace for trace, _ in kept])
    _note_absent_workers(recording, written)
    options = _options(recording, {rank for _, rank in unwanted if rank is not None})
    return [
        _publish(recording, trace, rank, {**options, **ascend.get(trace.path, {})}) for trace, rank in kept
    ]


def adopt(recording: Recording, files: set[str], folder: Path) -> None:
    """Publish files that were written after their capture had ended.

    Their sidecars have no clock and no facts from the end, because both were read before the files were
    written.
    """
    moved = engine_folder.move(files, folder, Path(recording.capture.out_dir), recording.prefix)
    late = replace(recording, closed=None, facts_at_stop={})
    publish_traces(late, [path for path in moved if engine_folder.is_trace(path.name)])


def _publish(recording: Recording, trace: Trace, rank: int | None, options: dict[str, Option]) -> Artifact:
    layout, ended = recording.target.layout, ending(recording, trace)
    return publish(
        trace.path,
        recording.capture,
        kind=_kind(trace),
        tool="vllm",
        rank=rank,
        world_size=None if layout is None else layout.size,
        topology=traces.topology(trace, layout),
        pid=trace.pid,
        host=trace.host,
        truncated=ended.truncated,
        ignored=recording.ignored,
        opened=recording.opened,
        closed=recording.closed,
        versions={"vllm": recording.target.version},
        options=options,
        stalls=stalls(recording, trace),
        iterations=iterations(recording, trace),
        iterations_asked=None if trace.frontend else recording.iterations_asked,
        ended=ended.ended,
        note=ended.note,
    )


def _kind(trace: Trace) -> str:
    if trace.is_recording:
        return "npu_recording"  # stepscope-npu uses the same name for its own recordings
    return "vllm_frontend_trace" if trace.frontend else "vllm_trace"


def _note_contradictions(recording: Recording, written: Sequence[Trace]) -> None:
    reasons = (traces.contradiction(trace, recording.target.layout) for trace in written)
    reason = next(filter(None, reasons), None)
    if reason is not None:
        recording.ignored["ranks"] = reason


def _note_absent_workers(recording: Recording, written: Sequence[Trace]) -> None:
    layout = recording.target.layout
    if layout is None or layout.external:
        return
    workers, expected = sum(not trace.frontend for trace in written), recording.workers_expected(layout)
    if workers < expected:
        recording.ignored["workers"] = f"{workers} of {expected} workers left a trace"


def _ascend_options(recording: Recording, kept: Sequence[Trace]) -> dict[Path, dict[str, Option]]:
    """Return {path: options} for recordings of vllm-ascend. Add the options without effect to `ignored`.

    If the engine is a server, only its recordings show that the server runs vllm-ascend.
    """
    options: dict[Path, dict[str, Option]] = {}
    for trace in kept:
        if trace.is_recording:
            ascend = ascend_profiler.of_recording(trace.path)
            options[trace.path] = ascend_profiler.options_of(ascend)
            if ascend is not None:
                recording.ignored = {**ascend.unable(recording.capture), **recording.ignored}
    return options


def _options(recording: Recording, removed: set[int]) -> dict[str, Option]:
    after = recording.facts_at_stop
    options: dict[str, Option] = {**steady(after), **between(recording.facts_at_start, after)}
    left = _left_aside(recording, removed, recording.target.layout)
    if left:
        options["left_aside"] = ", ".join(f"rank {rank}" for rank in left)
    return options


def _left_aside(recording: Recording, removed: set[int], layout: Layout | None) -> list[int]:
    """Return the global ranks of this engine that the capture does not want, ascending, including ranks that
    wrote no file.
    """
    wanted = recording.capture.ranks
    if wanted is None or layout is None or layout.external:
        return sorted(removed)
    first = recording.capture.replica * layout.size
    return sorted(removed | (set(range(first, first + layout.size)) - set(wanted)))
