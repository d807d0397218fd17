"""What a captured step still waits for, and what came after its process had given up on it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from stepscope.errors import RecordError
from stepscope.files.layout import StepLayout
from stepscope.files.manifest.parts import fold, part_files, write_manifest
from stepscope.files.manifest.records import LATE, Expectation, ProcessPart, of_engine
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.processes import is_running
from stepscope.files.storage.reading import read_record


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process promised, and that may still come or has come since."""

    step: int
    run_id: str
    process: str
    """`ProcessInfo.key` of who promised it."""
    name: str
    reason: str
    alive: bool | None
    """Whether that process still runs. None: it is on another host."""
    came: tuple[Artifact, ...] = ()
    """Files of it that have come since, with their sidecars, and stand in no manifest."""


def waiting(layout: StepLayout) -> list[Waiting]:
    """All that the processes of a step's captures wait for, of all runs."""
    parts = list(part_files(layout, as_written=True)[0].values())
    known = {artifact.path for part in parts for item in part.expected for artifact in item.artifacts}
    late = [sidecar for sidecar in _sidecars(layout) if sidecar.artifact.path not in known]
    found = [
        (part, item, tuple(each.artifact for each in late if _belongs(each, part, item)))
        for part in parts
        for item in part.expected
    ]
    return [
        Waiting(
            step=part.step,
            run_id=part.run_id,
            process=part.process.key,
            name=item.name,
            reason=item.reason or "",
            alive=_alive(part.process),
            came=came,
        )
        for part, item, came in found
        if item.pending is not None
        or (came and item.state == "ok")  # an engine's files come one after another
    ]


def take_in(layout: StepLayout, found: Sequence[Waiting]) -> list[Waiting]:
    """Enters what came into the manifest. What a process that still runs waits for it enters itself.

    Returns:
        Those that were entered.

    Raises:
        OSError: the disk or the folder does not let us.
    """
    mine = [each for each in found if each.came and not each.alive]
    parts = part_files(layout, as_written=True)[0]
    for path, part in parts.items():
        came = {e.name: e.came for e in mine if (e.process, e.run_id) == (part.process.key, part.run_id)}
        expected = tuple(_entered(item, came.get(item.name, ())) for item in part.expected)
        if expected != part.expected:
            parts[path] = msgspec.structs.replace(part, expected=expected)
            write_atomic(path, msgspec.json.encode(parts[path]))
    for run_id in {each.run_id for each in mine}:
        write_manifest(layout, fold([part for part in parts.values() if part.run_id == run_id]))
    return mine


def _sidecars(layout: StepLayout) -> list[Sidecar]:
    found = []
    for path in layout.sidecars():
        try:
            found.append(read_record(path, Sidecar))
        except (OSError, RecordError):
            continue  # of what it describes nothing is known; a merge names it
    return found


def _belongs(sidecar: Sidecar, part: ProcessPart, item: Expectation) -> bool:
    """Only an engine's files: what a process exports itself it enters itself."""
    replica = sidecar.artifact.replica
    return (
        (sidecar.step, sidecar.run_id) == (part.step, part.run_id)
        and replica is not None
        and (item.kind, item.name) == ("engine", f"replica {replica}")
    )


def _entered(item: Expectation, came: tuple[Artifact, ...]) -> Expectation:
    if not came:
        return item
    ignored = {option: why for artifact in came for option, why in artifact.ignored.items()}
    ignored = {option: why for option, why in {**item.ignored, **ignored}.items() if option != LATE}
    return of_engine(item.name, (*item.artifacts, *came), ignored)


def _alive(process: ProcessInfo) -> bool | None:
    return is_running(process.pid) if process.host == socket.gethostname() else None
