"""Files of the last capture of a step that one process captured several times (a retry)."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.timeline.sources import Source


def of_the_last(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Return the sources of the last capture, and those of earlier ones. `sources` are of one run.

    The last capture of each process counts. If the owner tried again, a worker counts only if it took part
    again. On another host, the owner's measurement of its clock decides that; else its opening time does.
    """
    last: dict[str, Source] = {}
    for source in sorted(sources, key=lambda source: source.capture):
        last[source.info.key] = source
    again = [source for source in last.values() if source.owner and source.capture > 1]
    for owner in again:
        before = max(
            (s for s in sources if s.info.key == owner.info.key and s.capture < owner.capture),
            key=lambda source: source.capture,
            default=None,
        )
        if before is not None:
            last = {
                key: worker
                for key, worker in last.items()
                if worker.owner or _took_part(worker, owner, before)
            }
    chosen = [source for source in sources if last.get(source.info.key) is source]
    return chosen, [source for source in sources if last.get(source.info.key) is not source]


def _took_part(worker: Source, owner: Source, before: Source) -> bool:
    """Return whether the worker took part in the owner's last capture, and not only in the one before."""
    if worker.info.host == owner.info.host:
        ended = before.closed or before.opened
        return worker.opened.wall_ns > ended.wall_ns
    measured = () if owner.part is None else owner.part.clocks
    measured_before = () if before.part is None else before.part.clocks
    key = worker.info.key
    return any(c.process == key for c in measured) or all(c.process != key for c in measured_before)
