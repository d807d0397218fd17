"""Traces in a step's folder, their processes, and the files that no reader supports."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stepscope.errors import RecordError
from stepscope.files import passes
from stepscope.files.cuda_memory import OOM_SUMMARY, SUMMARY
from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout, sidecar_of
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage.reading import files_below, read_record, size_below
from stepscope_report.timeline.model import FileProblem
from stepscope_report.timeline.readers.chrome import SUFFIXES, TraceFields
from stepscope_report.timeline.readers.contract import FoundFile, Reader, Readers

_NO_SIDECAR = "no sidecar: nothing says which process wrote it"
NO_HOST = "host unknown"
"""The host of a process whose trace names none."""
GONE = "it is in the manifest, and not here"
MERGED = "merged_trace"
"""The kind of a file in which an engine repeats the traces of its ranks."""
_SNAPSHOTS = ("cuda_memory_snapshot", "cuda_memory_oom_snapshot")


class TraceFile(NamedTuple):
    path: Path
    name: str
    """Path of the trace, relative to the step's folder."""
    sidecar: Sidecar | None
    reader: Reader | None = None
    """The reader of the file; None for a Chrome trace."""

    @property
    def found_file(self) -> FoundFile:
        return FoundFile(path=self.path, name=self.name, sidecar=self.sidecar)

    @property
    def role(self) -> str:
        """Role of the recorded process; without a sidecar, the name of the folder below `traces`."""
        return self.name.split("/")[1] if self.sidecar is None else self.sidecar.artifact.role

    def whose(self, fields: TraceFields) -> ProcessInfo:
        """Return what is known of the process that wrote the trace."""
        distributed = fields.distributed
        if self.sidecar is None:
            rank, world_size = (
                (None, None) if distributed is None else (distributed.rank, distributed.world_size)
            )
            host = fields.host or NO_HOST
            return ProcessInfo(role=self.role, rank=rank, world_size=world_size, host=host, pid=0)
        artifact = self.sidecar.artifact
        return ProcessInfo(
            role=artifact.role,
            rank=artifact.rank,
            world_size=artifact.world_size,
            host=artifact.host,
            pid=artifact.pid or 0,
            replica=artifact.replica,
        )


class StepFiles(NamedTuple):
    traces: list[TraceFile]
    unread: list[str]
    """Artifacts of this run that a timeline does not show, each with the reason."""
    problems: list[FileProblem]
    summaries: list[TraceFile]
    """Summaries of snapshots of CUDA's allocator."""
    passes: list[TraceFile]
    """Notes of engines' forward passes."""


def find_traces(
    layout: StepLayout,
    run_id: str | None,
    without: Collection[str] = (),
    elsewhere: Collection[Path] = (),
) -> StepFiles:
    """Return the traces of one run, or of all runs. A file without a sidecar belongs to every run.

    Args:
        without: Files and folders to leave out, relative to the step's folder.
        elsewhere: Absolute paths of traces that other machines have.
    """
    files, readers = StepFiles([], [], [], [], []), Readers()
    described = [path.with_name(path.name.removesuffix(SIDECAR_SUFFIX)) for path in layout.sidecars()]
    sidecars = {path: _read(sidecar_of(path)) for path in described}
    for path in sorted({*_files(layout), *(path for path in described if not path.is_dir())}):
        inside = path.relative_to(layout.root).as_posix()
        if any(inside == left_out or inside.startswith(f"{left_out}/") for left_out in without):
            continue
        sidecar = _speaks_for(path, sidecars, layout)
        if isinstance(sidecar, str):
            files.problems.append(FileProblem(file=_name(path, layout), what=sidecar))
        if not isinstance(sidecar, Sidecar) or run_id in (None, sidecar.run_id):
            if elsewhere and not path.exists() and Path(os.path.abspath(path)) in elsewhere:
                _take_elsewhere(layout, path, sidecar, files)
            else:
                _take(layout, path, sidecar, readers, files)
    files.problems.extend(readers.problems)
    return files


def lost_files(
    layout: StepLayout, promised: Iterable[Artifact], elsewhere: Mapping[Path, int]
) -> Iterator[FileProblem]:
    """Yield a problem for each file of the manifest that is missing here or incomplete.

    Args:
        elsewhere: Sizes of files that other machines have, by absolute path.
    """
    for path, size_bytes in {artifact.path: artifact.size_bytes for artifact in promised}.items():
        file = layout.root / path
        try:
            here = _size(file)
            beside = sidecar_of(file).exists()
        except (OSError, ValueError) as error:
            yield FileProblem(file=path, what=f"it is in the manifest and cannot be looked at: {error}")
            continue
        if here is None:
            here = elsewhere.get(Path(os.path.abspath(file)))
        if here is None and not beside:  # `find_traces` reports a file with a sidecar
            yield FileProblem(file=path, what=GONE)
        elif here is not None and here < size_bytes:
            yield FileProblem(file=path, what=f"cut off: {here:,} of {size_bytes:,} bytes are here")


def _size(path: Path) -> int | None:
    """Return the size in bytes of a file, or of all files in a folder; None if the path does not exist."""
    if path.is_dir():
        return size_below(path)
    return path.stat().st_size if path.is_file() else None


def _name(path: Path, layout: StepLayout) -> str:
    """Return the name relative to the step's folder. Bytes that are not UTF-8 are replaced, for JSON."""
    return os.fsencode(path.relative_to(layout.root).as_posix()).decode(errors="replace")


def trace_bytes(layout: StepLayout) -> int:
    """Return the bytes of traces that a merge will read."""
    files = find_traces(layout, None)
    return sum(trace.path.stat().st_size for trace in files.traces)


def _files(layout: StepLayout) -> Iterator[Path]:
    for path in files_below(layout.traces):
        hidden = any(part.startswith(".") for part in path.relative_to(layout.traces).parts)
        if not hidden and not path.name.endswith(SIDECAR_SUFFIX) and path.is_file():
            yield path


def _speaks_for(
    path: Path, sidecars: Mapping[Path, Sidecar | str], layout: StepLayout
) -> Sidecar | str | None:
    """Return the sidecar of the file, of a parent folder, or of the file with the same stem beside it."""
    for about in (path, *path.parents):
        if about == layout.traces:
            break
        if about in sidecars:
            return sidecars[about]
    if path.name.endswith(SUFFIXES):
        return None
    beside = (sidecar for other, sidecar in sidecars.items() if other.with_suffix("") == path.with_suffix(""))
    return next(beside, None)


def _take(
    layout: StepLayout, path: Path, described: Sidecar | str | None, readers: Readers, files: StepFiles
) -> None:
    name = _name(path, layout)
    sidecar = described if isinstance(described, Sidecar) else None
    file = FoundFile(path=path, name=name, sidecar=sidecar)
    if not path.is_file():
        files.problems.append(FileProblem(file=name, what="missing: only its sidecar exists"))
        return
    if file.kind == MERGED:
        files.unread.append(f"{name}: an engine merged it out of the traces beside it")
        return
    if file.kind in (SUMMARY, OOM_SUMMARY):
        files.summaries.append(TraceFile(path, name, sidecar))
        return
    if file.kind == passes.KIND:
        files.passes.append(TraceFile(path, name, sidecar))
        return
    if file.kind in _SNAPSHOTS:
        files.unread.append(f"{name}: for pytorch.org/memory_viz; the report reads the summary beside it")
        return
    reader, claim = readers.claim(file)
    if claim is not None and not claim.read:
        if claim.why is not None:
            files.unread.append(f"{name}: {claim.why}")
    elif reader is not None or path.name.endswith(SUFFIXES):
        if described is None:
            files.problems.append(FileProblem(file=name, what=_NO_SIDECAR))
        files.traces.append(TraceFile(path, name, sidecar, reader))
    elif described is not None:
        files.unread.append(f"{name}: nothing here reads {file.kind or path.suffix}")


def _take_elsewhere(
    layout: StepLayout, path: Path, described: Sidecar | str | None, files: StepFiles
) -> None:
    name = _name(path, layout)
    if isinstance(described, Sidecar) and described.artifact.kind == "torch_trace":
        files.traces.append(TraceFile(path, name, described))
    else:
        files.unread.append(f"{name}: on another host, where only torch traces are read")


def _read(path: Path) -> Sidecar | str:
    try:
        return read_record(path, Sidecar)
    except (OSError, RecordError) as error:
        return f"its sidecar cannot be read ({error}): nothing says which process wrote it"
