"""Files that an engine wrote after the deadline of its stop, found by their sidecars."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.files.manifest.records import LATE, Expectation, ProcessPart, of_engine
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.files.storage.reading import read_records


def with_late_files(layout: StepLayout, parts: Sequence[ProcessPart]) -> list[ProcessPart]:
    """Return a step's parts, with the files on disk of each replica whose files may still come.

    The engine's adapter writes a sidecar beside each file, also when the process that captured the step has
    ended. No part is changed on disk.
    """
    if not any(item.pending == "late" for part in parts for item in part.expected):
        return list(parts)
    known = {artifact.path for part in parts for item in part.expected for artifact in item.artifacts}
    sidecars = read_records(layout.sidecars(), Sidecar)  # a report names those that cannot be read
    late = [sidecar for sidecar in sidecars if sidecar.artifact.path not in known]
    return [
        _with(part, [of for of in late if (of.step, of.run_id) == (part.step, part.run_id)]) for part in parts
    ]


def _with(part: ProcessPart, late: Sequence[Sidecar]) -> ProcessPart:
    came: dict[str, list[Artifact]] = {}
    for sidecar in late:
        came.setdefault(f"replica {sidecar.artifact.replica}", []).append(sidecar.artifact)
    expected = tuple(_entered(item, came.get(item.name, ())) for item in part.expected)
    return msgspec.structs.replace(part, expected=expected)


def _entered(item: Expectation, came: Sequence[Artifact]) -> Expectation:
    if item.pending != "late" or not came:
        return item
    ignored = {
        **item.ignored,
        **{option: why for artifact in came for option, why in artifact.ignored.items()},
    }
    ignored.pop(LATE, None)
    return of_engine(item.name, (*item.artifacts, *came), ignored)
