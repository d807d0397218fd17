"""Counters of the host's devices, each a query of a vendor's library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from stepscope.backends.counters import CounterSource
from stepscope.files.counters import CounterKind, CounterScope

Handle = TypeVar("Handle")


class DeviceCounter(CounterSource, Generic[Handle]):
    """One query, of every device. A device that refuses it is not asked again."""

    scope: CounterScope = "host"

    def __init__(
        self,
        name: str,
        unit: str,
        query: Callable[[Handle], float],
        devices: Mapping[str, Handle],
        *,
        error: type[Exception],
        interval_s: float = 1.0,
        kind: CounterKind = "level",
    ) -> None:
        """Args:
        devices: The devices by name.
        error: Exception type that the query raises if a device refuses it.
        """
        self.name = name
        self.unit = unit
        self.kind = kind
        self.interval_s = interval_s
        self._query = query
        self._devices = dict(devices)
        self._error = error

    def sample(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for name, device in tuple(self._devices.items()):
            try:
                values[name] = float(self._query(device))
            except self._error:
                del self._devices[name]
        return values
