"""Parents of spans, across processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.files.spans import Open


def parents_of(records: Sequence[Sequence[Open]], keys: Sequence[str], step: int) -> list[int | None]:
    """Return the index of each span's parent, counted through the records of all processes. None: no parent.

    Args:
        records: Of each process. A record's `parent` is in the same process; its `link` is anywhere.
        keys: Of each process, `ProcessInfo.key`.
        step: Links to spans of another captured step lead out of this timeline.
    """
    first, indices = 0, []
    for spans in records:
        indices.append({span.span: first + at for at, span in enumerate(spans)})
        first += len(spans)
    by_key: dict[str, Mapping[int, int]] = {}
    for key, index in zip(keys, indices, strict=True):
        by_key.setdefault(key, index)
    parents = [
        _parent(span, own, by_key, step)
        for spans, own in zip(records, indices, strict=True)
        for span in spans
    ]
    cut_cycles(parents)
    return parents


def _parent(
    span: Open, own: Mapping[int, int], by_key: Mapping[str, Mapping[int, int]], step: int
) -> int | None:
    if span.parent is not None:
        return own.get(span.parent)
    link = span.link
    if link is None or link.step not in (None, step) or link.process not in by_key:
        return None
    return by_key[link.process].get(link.span)


def cut_cycles(parents: list[int | None]) -> None:
    """Cut every cycle of parents at one span. Only damaged files hold cycles."""
    done = bytearray(len(parents))
    for start in range(len(parents)):
        path: list[int] = []
        at: int | None = start
        while at is not None and not done[at]:
            done[at] = 1
            path.append(at)
            at = parents[at]
        if at is not None and done[at] == 1:
            parents[path[-1]] = None
        for index in path:
            done[index] = 2
