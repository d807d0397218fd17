"""Names of processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepscope.files.sidecar import ProcessInfo


def names_of(infos: Sequence[ProcessInfo]) -> list[str]:
    """Return a short, unique name for each process: `actor 0`, `rollout replica 1`, or with pid and host."""
    names = [_short_name(info) for info in infos]
    for longer in (" pid {0.pid}", " on {0.host}", " #{1}"):
        count = Counter(names)
        names = [
            name if count[name] == 1 else name + longer.format(info, number)
            for number, (name, info) in enumerate(zip(names, infos, strict=True))
        ]
    return names


def _short_name(info: ProcessInfo) -> str:
    if info.rank is not None:
        return f"{info.role} {info.rank}"
    return info.role if info.replica is None else f"{info.role} replica {info.replica}"
