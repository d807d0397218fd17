"""A step as one TAR for Perfetto: the unchanged traces, stepscope's own rows, and the offset of each file.

The format is Perfetto's trace manifest, version 1 (docs/reference/perfetto-manifest.md in Perfetto, which
reads it since version 58). No event is rewritten, so an archive takes as long as copying the files.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from stepscope.files.storage import temporary
from stepscope_report.timeline.merge import Selection
from stepscope_report.timeline.merge.mapping import Place
from stepscope_report.timeline.merge.merge import EVERYTHING, Plan, Source, plan_merge, write_plan
from stepscope_report.timeline.merge.write import RowTrace, RowTraces, full_disk_names, timeline_file
from stepscope_report.timeline.model import FileProblem

MANIFEST = "perfetto_manifest.json"
OWN = "stepscope.json"
"""Name of the file with stepscope's own rows. Times of the other files are related to the times in this
file."""


class ArchivedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One trace in an archive."""

    path: str
    machine: str
    """Name of the process, under which Perfetto groups the file's tracks."""
    offset_ns: int | None
    """Ns to add to the file's times, to place them on the archive's time axis, or None if unknown."""


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an archive."""

    format: int = 1
    step: int
    run_id: str
    base_ns: int
    """Origin of the time axis in unix ns on the owner's clock."""
    spans: int
    files: tuple[ArchivedFile, ...]
    left_out: tuple[str, ...]
    problems: tuple[FileProblem, ...]
    incomplete: tuple[str, ...] = ()


def write_archive(
    source: Source,
    to: Path,
    selection: Selection = EVERYTHING,
    on_read: Callable[[int], None] | None = None,
) -> Archived:
    """Write one archive. See `merge_step` for the arguments and errors."""
    plan = plan_merge(source, selection)
    files = [_described(row, trace, plan) for row, trace in _traces(plan)]
    name = temporary(to)
    try:
        with TemporaryDirectory(dir=to.absolute().parent) as folder, full_disk_names(to):
            own = Path(folder) / OWN
            with timeline_file(own, plan.common.axis.base_ns) as out:
                merged = write_plan(plan._replace(traces=[]), out, on_read)
                out.finish(merged)
            # Perfetto does not read long names in PAX headers, and before 58 it reads no PAX headers at all.
            with tarfile.open(name, "x", format=tarfile.GNU_FORMAT) as archive:
                _add_text(archive, MANIFEST, _manifest(files, plan))
                archive.add(own, OWN)
                for _, trace in _traces(plan):
                    archive.add(trace.path, trace.name, recursive=False)
                    if on_read is not None:
                        on_read(trace.path.stat().st_size)
        os.replace(name, to)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    unknown = (
        FileProblem(file=file.path, what="its place in time is unknown: it lies where Perfetto puts it")
        for file in files
        if file.offset_ns is None
    )
    return Archived(
        step=source.timeline.step,
        run_id=source.timeline.run_id,
        base_ns=plan.common.axis.base_ns,
        spans=merged.spans,
        files=tuple(files),
        left_out=merged.left_out,
        problems=(*merged.problems, *unknown),
        incomplete=source.incomplete,
    )


def _traces(plan: Plan) -> Iterator[tuple[RowTraces, RowTrace]]:
    return ((row, trace) for row in plan.traces for trace in row.traces)


def _described(traces: RowTraces, trace: RowTrace, plan: Plan) -> ArchivedFile:
    """Return the description of a trace. If its clock drifts, the offset at the middle of the step is
    used.
    """
    row, axis, window = traces.row, plan.common.axis, plan.timeline.window
    offset_ns = None
    if row.unaligned is None:
        place = Place(row, trace.base_ns, axis)
        middle_ns = (window.start_ns + window.end_ns) // 2 - (trace.base_ns or 0)
        (position,) = place.positions([middle_ns])
        offset_ns = position - middle_ns
    return ArchivedFile(path=trace.name, machine=row.name, offset_ns=offset_ns)


def _manifest(files: Sequence[ArchivedFile], plan: Plan) -> bytes:
    """Return the manifest, which Perfetto recognises by its first bytes. Each trace is placed relative to the
    file `OWN`, because JSON traces have no clock.
    """
    entries: list[dict[str, object]] = [{"path": OWN, "machine": {"name": "stepscope"}}]
    for file in files:
        entry: dict[str, object] = {"path": file.path, "machine": {"name": file.machine}}
        if file.offset_ns is not None:
            entry["clocks"] = {"sync_to": {"file": OWN}, "offset_ns": file.offset_ns}
        entries.append(entry)
    attributes = {"stepscope.run_id": plan.timeline.run_id, "stepscope.step": plan.timeline.step}
    document = {"perfetto_manifest": {"version": 1, "files": entries, "attributes": attributes}}
    return msgspec.json.encode(document)


def _add_text(archive: tarfile.TarFile, name: str, text: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))
