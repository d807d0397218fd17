"""Artifacts of one recording: its traces with ranks and sidecars, in the folder of its capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.engines.artifacts import Option, publish
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture.outcome import Outcome
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._driving import ascend_profiler
from stepscope_vllm._driving.facts import between, steady
from stepscope_vllm._files import engine_folder, names, ranks, traces
from stepscope_vllm._files.ranks import Layout
from stepscope_vllm._files.traces import Trace


def publish_traces(recording: Recording, paths: Sequence[Path]) -> list[Artifact]:
    """Write a sidecar beside each trace; remove traces of ranks that the capture does not want."""
    capture, layout = recording.capture, recording.target.layout
    written = [traces.read(path) for path in paths]
    _note_contradictions(recording, written)
    placed = [(trace, ranks.global_rank(trace, layout, capture.replica)) for trace in written]
    unwanted = [(trace, rank) for trace, rank in placed if _is_unwanted(recording, rank)]
    for trace, _ in unwanted:
        engine_folder.remove(trace.path)
    kept = [pair for pair in placed if pair not in unwanted]
    ascend = _ascend_options(recording, [trace for trace, _ in kept])
    _note_absent_workers(recording, written)
    options = _options(recording, {rank for _, rank in unwanted if rank is not None})
    outcome = recording.outcome()
    return [
        _publish(recording, outcome, trace, rank, {**options, **ascend.get(trace.path, {})})
        for trace, rank in kept
    ]


def adopt(recording: Recording, files: set[str], folder: Path) -> None:
    """Publish files that came after the end of their capture had given them up.

    The clock and the facts at that end say nothing about them.
    """
    moved = engine_folder.move(files, folder, Path(recording.capture.out_dir), recording.prefix)
    late = replace(recording, closed=None, facts_at_stop={})
    publish_traces(late, [path for path in moved if names.is_trace(path.name)])


def _publish(
    recording: Recording, outcome: Outcome, trace: Trace, rank: int | None, options: dict[str, Option]
) -> Artifact:
    layout, ending = recording.target.layout, outcome.ending(trace)
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
        stalls=() if trace.frontend else outcome.stalls(trace, recording.changed_ns),
        iterations=outcome.iterations(trace),
        iterations_asked=None if trace.frontend else outcome.asked,
        ended=ending.ended,
        note=ending.note,
    )


def _kind(trace: Trace) -> str:
    if trace.is_recording:
        return "npu_recording"  # as stepscope-npu names its own
    return "vllm_frontend_trace" if trace.frontend else "vllm_trace"


def _is_unwanted(recording: Recording, rank: int | None) -> bool:
    wanted = recording.capture.ranks
    return wanted is not None and rank is not None and rank not in wanted


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
    """Read the options of recordings of vllm-ascend, and note those that it did not honour.

    Of a server, nothing else says that it is vllm-ascend's.
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
    """Return the unwanted global ranks of this engine, whether they wrote a file or not."""
    wanted = recording.capture.ranks
    if wanted is None or layout is None or layout.external:
        return sorted(removed)
    return sorted(removed | ranks.unwanted(wanted, layout, recording.capture.replica))
