"""Facts about a closed capture, from its manifest alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from stepscope.files.manifest.records import Manifest, ProcessPart
from stepscope.files.sidecar import ProcessInfo

_IN_FULL = 3
"""Problems that `shortfall` lists in full."""


def is_open_elsewhere(parts: Iterable[ProcessPart], process: ProcessInfo) -> bool:
    """Return whether another rank that opened this capture by itself has not closed its own yet."""
    peers = [part for part in parts if is_peer(part, process)]
    return any(item.pending == "closing" for part in peers for item in part.expected)


def is_peer(part: ProcessPart, process: ProcessInfo) -> bool:
    """Return whether the part is of another rank that opened this capture by itself."""
    return part.owner and part.process != process


def problems_to_tell(manifest: Manifest, process: ProcessInfo) -> list[str]:
    """Return the problems that this process reports: its own, and those of processes that it started,
    including stops that went past their deadline.

    Ranks that open captures of their own report their own problems. The last one to close also reports those
    of dead ranks.
    """
    is_last = not is_open_elsewhere(manifest.processes, process)
    own = [
        part for part in manifest.processes if not is_peer(part, process) or (is_last and part.closed is None)
    ]
    return _troubles(msgspec.structs.replace(manifest, processes=tuple(own)))


def _troubles(manifest: Manifest) -> list[str]:
    return manifest.problems() + manifest.awaited(only="late")


def shortfall(manifest: Manifest, no_profiler: str | None) -> str | None:
    """Return the problems of a capture, or else `no_profiler`, in one line; None if there are none so far."""
    problems = _troubles(manifest)
    if not problems:
        return no_profiler
    more = f" (and {len(problems) - _IN_FULL} more)" if len(problems) > _IN_FULL else ""
    return "; ".join(problems[:_IN_FULL]) + more


def summary(manifest: Manifest, folder: Path, save_path: str, apart: Sequence[str]) -> str:
    """Return one line for the log: participants, traces (pending ones too), and the step's folder.

    A process whose spans could not be written is not among the participants.
    """
    items = [item for part in manifest.processes for item in part.expected]
    traces = sum(len(item.artifacts) + (item.pending == "exporting") for item in items)
    lost = [item for item in items if item.kind == "spans" and item.state == "failed"]
    processes = len(manifest.processes) - len(lost)
    if not processes and not traces:
        return f"step {manifest.step} was not captured: {lost[0].reason if lost else 'no process took part'}"
    elsewhere = f" and {len(apart)} on other hosts, whose files are fetched" if apart else ""
    return (
        f"step {manifest.step} captured: {processes} process{'es' * (processes != 1)}{elsewhere}, "
        f"{traces} trace{'s' * (traces != 1)}, in {folder}; "
        f"`stepscope report {save_path} --step {manifest.step}`"
    )
