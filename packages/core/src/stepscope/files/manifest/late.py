"""Late files: the ones that a captured step still waits for, and those that came after the deadline."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.manifest.parts import fold, of_the_last, part_files, write_manifest
from stepscope.files.manifest.records import LATE, Expectation, ProcessPart, of_engine
from stepscope.files.sidecar import Artifact, ProcessInfo, Sidecar
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.processes import is_running
from stepscope.files.storage.reading import read_records


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A thing that a process promised, and that may still come or has come since."""

    step: int
    run_id: str
    process: str
    """`ProcessInfo.key` of the process that promised it."""
    name: str
    reason: str
    alive: bool | None
    """True if that process still runs; None if it is on another host."""
    came: tuple[Artifact, ...] = ()
    """Its files that have come since, with their sidecars, and that no manifest lists."""


def waiting(layout: StepLayout) -> list[Waiting]:
    """Return everything that the processes of a step's last captures wait for, of all runs."""
    parts = list(part_files(layout, as_written=True)[0].values())
    runs = dict.fromkeys(part.run_id for part in parts)
    last = [part for run in runs for part in of_the_last([part for part in parts if part.run_id == run])]
    known = {artifact.path for part in parts for item in part.expected for artifact in item.artifacts}
    sidecars = read_records(layout.sidecars(), Sidecar)  # a merge reports those that cannot be read
    late = [sidecar for sidecar in sidecars if sidecar.artifact.path not in known]
    items = [
        (part, item, tuple(sidecar.artifact for sidecar in late if _belongs(sidecar, part, item)))
        for part in last
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
        for part, item, came in items
        if item.pending is not None
        or (came and item.state == "ok")  # an engine's files come one after another
    ]


def take_in(layout: StepLayout, awaited: Sequence[Waiting]) -> list[Waiting]:
    """Enter files that came into the manifest, except those of a process that still runs.

    Such a process enters its files itself.

    Returns:
        The entries that were made.

    Raises:
        OSError: the manifest cannot be written.
    """
    arrived = [item for item in awaited if item.came and not item.alive]
    parts = part_files(layout, as_written=True)[0]
    for path, part in parts.items():
        owner = (part.process.key, part.run_id)
        came = {item.name: item.came for item in arrived if (item.process, item.run_id) == owner}
        expected = tuple(_entered(item, came.get(item.name, ())) for item in part.expected)
        if expected != part.expected:
            parts[path] = msgspec.structs.replace(part, expected=expected)
            write_atomic(path, msgspec.json.encode(parts[path]))
    for run_id in {item.run_id for item in arrived}:
        write_manifest(layout, fold([part for part in parts.values() if part.run_id == run_id]))
    return arrived


def _belongs(sidecar: Sidecar, part: ProcessPart, item: Expectation) -> bool:
    """Return whether a file is of the engine `item`. A process enters its own exports itself."""
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
