"""Decorated functions in an importable module, for the tests of pickling, spawning and Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal

from stepscope import profile_step
from stepscope._recording.spans import slot


@profile_step(role="env")
def task(n: int, *, exact: Decimal = Decimal(1)) -> tuple[int, bool, int]:
    """(n + 1, whether a capture was on here, pid)."""
    return n + 1, slot.session() is not None, os.getpid()


@profile_step(role="env")
def task_stream(n: int) -> Iterator[int]:
    for i in range(n):  # noqa: UP028 # Ray sends its statistics in, which a range does not take
        yield i


class Actor:
    @profile_step(role="actor")
    def update(self, n: int, *, lr: float = 1.0) -> int:
        return n + 1

    @profile_step(role="actor")
    @classmethod
    def create(cls) -> str:
        return cls.__name__

    @profile_step(role="actor")
    @staticmethod
    def double(n: int) -> int:
        return 2 * n

    @profile_step(role="rollout")
    def stream(self, n: int) -> Iterator[int]:
        for i in range(n):  # noqa: UP028 # likewise
            yield i


class AsyncActor:
    @profile_step(role="agent_loop")
    async def generate(self, n: int) -> int:
        return n + 1

    @profile_step(role="rollout")
    async def stream(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
