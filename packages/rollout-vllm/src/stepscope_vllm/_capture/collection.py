"""Collection of a recording's files: told apart from those of others, complete, moved and published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import EngineError
from stepscope.files.manifest.records import IDLE
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture.outcome import is_idle
from stepscope_vllm._capture.publishing import adopt, publish_traces
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._driving.target import Started
from stepscope_vllm._files import engine_folder, names, traces


def collect(recording: Recording, late: Recording | None) -> list[Artifact]:
    """Publish the files of a recording that has ended.

    Args:
        late: The recording before, if it got no files. Files that came since then are its own.

    Raises:
        EngineError: it did not begin, or its traces are missing or incomplete.
    """
    started = recording.started
    if started is None:
        raise EngineError("the capture did not begin")
    if started.by_others:
        return []
    files = files_of(recording, started, late)
    if not any(map(names.is_trace, files)) and is_idle(recording.target.reports):
        recording.ignored[IDLE] = "the engine ran no iteration during the capture"
        return []
    _expect_complete(started.folder, files)
    recording.changed_ns = engine_folder.changed_ns(started.folder, files)
    return publish_traces(recording, _at_home(recording, started, files))


def files_of(recording: Recording, started: Started, late: Recording | None) -> set[str]:
    """Return the names of a recording's files in the engine's folder; hand files of `late` to it."""
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
    """Return whether a trace of this recording is there already, before our stop."""
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
    """Move the files to the capture's folder if they are not there yet; return the paths of the traces."""
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
