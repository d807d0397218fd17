"""The counter `toy queue`: how many jobs wait in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.backends.counters import CounterSource

waiting = 3


class Queue(CounterSource):
    name = "toy queue"
    unit = ""

    def sample(self) -> Mapping[str, float]:
        return {"": waiting}


def counters() -> Sequence[CounterSource]:
    return (Queue(),)


def broken() -> Sequence[CounterSource]:
    raise ImportError("libtoy is not here")
