"""Collection of a recording's files: identified, complete, moved, and published with ranks and sidecars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.engines.artifacts import Option, publish
from stepscope.engines.passes import publish_passes
from stepscope.errors import EngineError
from stepscope.files.manifest.records import IDLE
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture import outcome
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._driving import ascend_profiler
from stepscope_vllm._driving.facts import between, steady
from stepscope_vllm._driving.target import PASSES_NEEDED, Started
from stepscope_vllm._files import engine_folder, names, ranks, traces
from stepscope_vllm._files.ranks import Layout
from stepscope_vllm._files.traces import Trace


def collect(recording: Recording, late: Recording | None) -> list[Artifact]:
    """Publish the files of a recording that has ended.

    Args:
        late: The previous recording, if it got no files. Files that were written since then belong to it.

    Raises:
        EngineError: the recording did not begin, or its traces are missing or incomplete.
    """
    started = recording.started
    if started is None:
        raise EngineError("the capture did not begin")
    if started.by_others or not recording.capture.profiler:
        return []
    files = files_of(recording, started, late)
    if not any(map(names.is_trace, files)) and outcome.is_idle(recording.target.reports):
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
    if not files:
        recording.ignored.setdefault("passes", f"the engine noted no passes. {PASSES_NEEDED}")
    return [one for file in files for one in publish_passes(file, recording.capture)]


def files_of(recording: Recording, started: Started, late: Recording | None) -> set[str]:
    """Return the names of a recording's files in the engine's folder, and publish files that belong to
    `late`.
    """
    present = engine_folder.listed(started.folder)
    named = {name for name in present - recording.files_before if recording.is_named(name)}
    if started.aimed:
        return named
    if started.named and not any(map(names.is_recording, present)):
        return named
    # A worker does one thing after another. So files that came during the start belong to the recording
    # before, if it has none. Otherwise they are ours.
    between = recording.files_at_start - recording.files_before if late is not None else set()
    if late is not None and between:
        adopt(late, between, started.folder)
    return present - recording.files_before - between


def has_ended(recording: Recording) -> bool:
    """Return whether the engine has written a trace of this recording before it was stopped."""
    started = recording.started
    if started is None or not (started.aimed or started.named):
        return False  # nothing tells its files from those that are late
    new = engine_folder.listed(started.folder) - recording.files_before
    return any(names.is_trace(name) and recording.is_named(name) for name in new)


def remove(recording: Recording) -> None:
    """Remove the files of a recording that was given up."""
    if recording.started is not None:
        for name in files_of(recording, recording.started, None):
            engine_folder.remove(recording.started.folder / name)


def _expect_complete(folder: Path, files: set[str]) -> None:
    paths = [folder / name for name in files if names.is_trace(name)]
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
    """Move the files to the capture's folder unless they are there already. Return the paths of the
    traces.
    """
    home, folder = Path(recording.capture.out_dir), recording.target.folder
    if not started.aimed:
        moved = engine_folder.move(files, started.folder, home, recording.prefix)
        return [path for path in moved if names.is_trace(path.name)]
    paths = [started.folder / name for name in files if names.is_trace(name)]
    if folder is not None:  # that of the AsyncLLM itself, whose profiler cannot be aimed
        own = engine_folder.of_frontends(folder) - recording.files_before
        traces.wait_until_complete(folder / name for name in own)
        paths += engine_folder.move(own, folder, home, recording.prefix)
    return paths


def publish_traces(recording: Recording, paths: Sequence[Path]) -> list[Artifact]:
    """Write a sidecar beside each trace; remove traces of ranks that the capture does not want."""
    capture, layout = recording.capture, recording.target.layout
    written = [traces.read(path) for path in paths]
    _note_contradictions(recording, written)
    placed = [(trace, ranks.global_rank(trace, layout, capture.replica)) for trace in written]
    wanted = None if capture.ranks is None else {None, *capture.ranks}  # what names no rank is kept
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
    """Publish files that were written after their capture ended without them.

    The clock and the facts recorded at that end are not used for them.
    """
    moved = engine_folder.move(files, folder, Path(recording.capture.out_dir), recording.prefix)
    late = replace(recording, closed=None, facts_at_stop={})
    publish_traces(late, [path for path in moved if names.is_trace(path.name)])


def _publish(recording: Recording, trace: Trace, rank: int | None, options: dict[str, Option]) -> Artifact:
    layout, ending = recording.target.layout, outcome.ending(recording, trace)
    return publish(
        trace.path,
        recording.capture,
        kind=_kind(trace),
        tool="vllm",
        rank=rank,
        world_size=None if layout is None else layout.size,
        topology=ranks.topology(trace, layout),
        pid=trace.pid,
        host=trace.host,
        truncated=ending.truncated,
        ignored=recording.ignored,
        opened=recording.opened,
        closed=recording.closed,
        versions={"vllm": recording.target.version},
        options=options,
        stalls=outcome.stalls(recording, trace),
        iterations=outcome.iterations(recording, trace),
        iterations_asked=None if trace.frontend else recording.iterations_asked,
        ended=ending.ended,
        note=ending.note,
    )


def _kind(trace: Trace) -> str:
    if trace.is_recording:
        return "npu_recording"  # as stepscope-npu names its own
    return "vllm_frontend_trace" if trace.frontend else "vllm_trace"


def _note_contradictions(recording: Recording, written: Sequence[Trace]) -> None:
    reasons = (ranks.contradiction(trace, recording.target.layout) for trace in written)
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
    """Read the options of recordings of vllm-ascend, and add the ones without effect to `ignored`.

    For a server, only these recordings show that it runs vllm-ascend.
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
    """Return the unwanted global ranks of this engine, including ranks that wrote no file."""
    wanted = recording.capture.ranks
    if wanted is None or layout is None or layout.external:
        return sorted(removed)
    first = recording.capture.replica * layout.size
    return sorted(removed | (set(range(first, first + layout.size)) - set(wanted)))
