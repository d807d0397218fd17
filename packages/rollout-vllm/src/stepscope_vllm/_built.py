"""What the environment said when an engine was built: it may say another thing at its captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from stepscope_vllm import _facts

_built_in: WeakKeyDictionary[object, Mapping[str, object]] = WeakKeyDictionary()
"""Engine -> settings of its profiler. One writer: `building`."""


@contextmanager
def building(owned: Callable[[], list[object]]) -> Iterator[None]:
    """Around building engines.

    Args:
        owned: The engines that live in this process.
    """
    earlier = owned()
    yield
    settings = _facts.settings_of_environment()
    for engine in owned():
        if all(engine is not each for each in earlier):
            _built_in[engine] = settings


def environment_of(engine: object) -> Mapping[str, object]:
    """Settings of the profiler by the environment it was built in; by today's where that was not noted."""
    known = _built_in.get(engine)
    return _facts.settings_of_environment() if known is None else known
