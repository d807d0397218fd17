"""Collectives in the traces of a step's processes, read once, and where the traces are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path

from stepscope_report.timeline.clocks.collectives import Collectives, Kind, Refused, Series, read_collectives
from stepscope_report.timeline.digests import Digests
from stepscope_report.timeline.processes import Lost, files_elsewhere, results
from stepscope_report.timeline.sources import Source

Known = Mapping[int, Mapping[Kind, Series | Refused]]
"""Collectives of each source, by its index."""


def collectives_of(
    source: Source, traces: Sequence[Path], digests: Digests | None
) -> dict[Kind, Series | Refused]:
    """Return the collectives of one process, from the digests if they are kept."""
    world = _world(source)
    kept = None if digests is None else digests.kept(traces, Collectives, world)
    if kept is not None:
        return dict(kept)
    stamps = () if digests is None else digests.stamps(traces)
    collectives = read_collectives(world, traces)
    if digests is not None:
        digests.keep(traces, list(collectives.items()), stamps, world)
    return collectives


def _world(source: Source) -> str:
    replica = "" if source.info.replica is None else f" replica {source.info.replica}"
    return source.info.role + replica


def read_world(part: tuple[str, list[Path]]) -> Collectives:
    """Return the collectives of one process, of this world and in these traces, where its traces are."""
    return list(read_collectives(*part).items())


def collectives_elsewhere(
    sources: Sequence[Source], traces: Mapping[int, list[Path]], executor: Executor | None
) -> Known:
    """Return the collectives of processes whose traces only other machines have. Lost ones are none."""
    elsewhere = files_elsewhere(executor).keys()
    far = {index: paths for index, paths in traces.items() if not elsewhere.isdisjoint(paths)}
    if executor is None or not far:
        return {}
    parts = [(_world(sources[index]), paths) for index, paths in far.items()]
    with closing(results(executor, read_world, parts, list(far.values()))) as read:
        return {
            index: {} if isinstance(collectives, Lost) else dict(collectives)
            for index, collectives in zip(far, read, strict=True)
        }
