"""Traces in a step's folder, their processes, the facts in names of files and folders, and the files that no
reader supports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stepscope.errors import RecordError
from stepscope.files import passes
from stepscope.files.cuda_memory import OOM_SUMMARY, SUMMARY
from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout, sidecar_of
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage import files_below, read_record, size_below
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
        """Return the process that wrote the trace, as the sidecar names it, or else the trace. Unknown pids
        are 0.
        """
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
    """Return the path as text, relative to the step's folder. Bytes that are not UTF-8 are replaced, for
    JSON.
    """
    return os.fsencode(path.relative_to(layout.root).as_posix()).decode(errors="replace")


def trace_bytes(layout: StepLayout) -> int:
    """Return the number of bytes of the traces that a merge will read."""
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
    """Return the sidecar of the file or of a parent folder, or None. If the file is not named as a
    Chrome trace, this may also be the sidecar of a file with the same stem beside it.
    """
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


_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?(\d+)", re.IGNORECASE)
_ACCELERATE = re.compile(r"profile_(\d+)\.json")
_DIMENSION = re.compile(r"(?:^|[^A-Za-z])(tp|pp|dp|ep)[-_]?(\d+)(?=[^0-9]|$)", re.IGNORECASE)
_REPLICA = re.compile(r"replica[-_]?(\d+)", re.IGNORECASE)
_STEP = re.compile(r"(?:iteration|step)[-_]?(\d+)")
_VERL = re.compile(
    r"(?:(?!step\d)(?P<role>[^_]+)_)?(?:(?!step\d)(?P<stage>(?:(?!_step\d|_?rank\d).)+)_)?"
    r"(?:step(?P<step>\d+)[^_]*_)?rank(?P<rank>\d+)(?:-of-(?P<world>\d+))?_(?:[a-z0-9-]+_)?"
    r"(?:pid)?(?P<pid>\d+)_\d{10,}"
)
_NEMO = re.compile(r"(?P<worker>\w+?)_worker(?:_process)?_(?:(?P<first>\d+)[:-](?P<end>\d+)_)?(?P<pid>\d+)\.")
_MSTX = re.compile(
    r"(?:(?P<step>\d+)/)?(?:(?P<role>actor|ref|critic|rollout|reward)_)?(?P<stage>[a-z][a-z_]*)"
    r"/[^/]+_(?P<pid>\d+)_\d{17}_ascend_pt/"
)
"""Folder of verl's NPU profiler. A folder that names neither a step nor a role is the user's own."""
_SGLANG = re.compile(r"-TP-\d+.*-(EXTEND|DECODE|prefill|decode)\.")
_STAGES = {"EXTEND": "prefill", "DECODE": "decode"}


class Named(NamedTuple):
    """Facts in a trace's path. A fact is None if the path does not state it."""

    role: str | None = None
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    world_size: int | None = None
    replica: int | None = None
    pid: int | None = None
    steps: range = range(0)
    """Steps that the trace covers; empty if the path does not state any."""


def named(path: str) -> Named:
    """Return the facts in the path of a trace, which is relative to the folder that was given."""
    *folders, name = path.split("/")
    verl, nemo, replica = _VERL.match(name), _NEMO.match(name), _REPLICA.search(path)
    by_stage = _SGLANG.search(name)
    of_verl: dict[str, str | None] = {} if verl is None else verl.groupdict()
    mstx = _MSTX.search(path)
    if mstx is not None and (mstx["step"] or mstx["role"]):
        of_verl = mstx.groupdict()
    step = of_verl.get("step") or next((m[1] for m in map(_STEP.fullmatch, reversed(folders)) if m), None)
    role = of_verl.get("role")
    if nemo is not None:
        role = _role_of(nemo["worker"])
    steps = range(0) if step is None else range(int(step), int(step) + 1)
    if nemo is not None and nemo["first"] is not None:
        steps = range(int(nemo["first"]), int(nemo["end"]))
        step = nemo["first"] if len(steps) == 1 else None
    return Named(
        role="rollout" if replica is not None else role,
        stage=of_verl.get("stage") if by_stage is None else _STAGES.get(by_stage[1], by_stage[1]),
        step=_number(step),
        rank=_rank(path),
        world_size=_number(of_verl.get("world")),
        replica=None if replica is None else int(replica[1]),
        pid=_number(of_verl.get("pid") if nemo is None else nemo["pid"]),
        steps=steps,
    )


def dimensions(name: str) -> dict[str, int]:
    """Return the position in the parallel layout that a file's name states: `{"tp": 0, "dp": 1}`."""
    return {key.lower(): int(number) for key, number in _DIMENSION.findall(name)}


def _role_of(worker: str) -> str:
    """Return the role of a worker of NeMo-RL."""
    if "generation" in worker or worker.startswith(("vllm", "sglang", "trtllm")):
        return "rollout"
    return "actor" if "policy" in worker else worker


def _rank(path: str) -> int | None:
    names = path.split("/")
    accelerate = _ACCELERATE.match(names[-1])
    if accelerate is not None:
        return int(accelerate[1])
    matches = map(_RANK.search, reversed(names))
    return next((int(match[1]) for match in matches if match is not None), None)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
