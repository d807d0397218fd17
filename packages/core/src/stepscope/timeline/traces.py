"""The traces in a step's folder: which files there are, whose they are, and what nobody here reads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout, sidecar_of
from stepscope.files.sidecar import ProcessInfo, Sidecar
from stepscope.timeline.model import FileProblem
from stepscope.timeline.readers.chrome import TraceFields

_SUFFIXES = (".json", ".json.gz")


class TraceFile(NamedTuple):
    path: Path
    name: str
    """Relative to the step's folder."""
    sidecar: Sidecar | None

    @property
    def role(self) -> str:
        """Of what was recorded; without a sidecar, the folder that it lies in below `traces`."""
        return self.name.split("/")[1] if self.sidecar is None else self.sidecar.artifact.role

    def whose(self, fields: TraceFields) -> ProcessInfo:
        """The process that wrote it, as far as anything says."""
        said = fields.distributed
        if self.sidecar is None:
            rank, world_size = (None, None) if said is None else (said.rank, said.world_size)
            host = fields.host or "host unknown"
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


class Found(NamedTuple):
    traces: list[TraceFile]
    unread: list[str]
    """Artifacts of this run that no timeline is made of, each with its kind."""
    problems: list[FileProblem]


def find_traces(layout: StepLayout, run_id: str) -> Found:
    """The traces of one run. A file without a sidecar may be of any run, and counts as of this one."""
    found = Found([], [], [])
    described = {path.with_name(path.name.removesuffix(SIDECAR_SUFFIX)) for path in layout.sidecars()}
    files = {path for path in layout.traces.rglob("*") if _is_trace(path)}
    for path in sorted(files | described):
        if not any(part.startswith(".") for part in path.relative_to(layout.root).parts):
            _take(layout, path, run_id, found)
    return found


def trace_bytes(layout: StepLayout) -> int:
    """How many bytes of traces a merge will read."""
    return sum(path.stat().st_size for path in layout.traces.rglob("*") if _is_trace(path))


def _is_trace(path: Path) -> bool:
    return path.name.endswith(_SUFFIXES) and not path.name.endswith(SIDECAR_SUFFIX) and path.is_file()


def _take(layout: StepLayout, path: Path, run_id: str, found: Found) -> None:
    name = path.relative_to(layout.root).as_posix()
    sidecar = _sidecar(path)
    if isinstance(sidecar, Sidecar) and sidecar.run_id != run_id:
        return
    if isinstance(sidecar, str):
        found.problems.append(FileProblem(file=name, what=sidecar))
    if not path.is_file():
        found.problems.append(FileProblem(file=name, what="missing: only its sidecar is there"))
    elif not path.name.endswith(_SUFFIXES):
        kind = sidecar.artifact.kind if isinstance(sidecar, Sidecar) else path.suffix
        found.unread.append(f"{name}: nothing here reads {kind}")
    else:
        found.traces.append(TraceFile(path, name, sidecar if isinstance(sidecar, Sidecar) else None))


def _sidecar(path: Path) -> Sidecar | str:
    try:
        return msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar)
    except FileNotFoundError:
        return "no sidecar: nothing says which process wrote it"
    except (OSError, ValueError, msgspec.DecodeError) as error:
        return f"its sidecar cannot be read ({error}): nothing says which process wrote it"
