"""SglangServer: the profiler of a replica behind HTTP, through `/start_profile` and `/stop_profile`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stepscope.backends.counters import CounterSource
from stepscope.engines.http import Server, workers_of
from stepscope.engines.metrics import EngineMetrics
from stepscope_sglang._capture.replica import ReplicaProfiler
from stepscope_sglang._driving.facts import counters_of
from stepscope_sglang._driving.http import ServerTarget
from stepscope_sglang._driving.target import Target


class SglangServer(ReplicaProfiler):
    """Profiler of an SGLang server, or of the several that make up one replica (prefill and decode servers).

    The servers write the files, so they must share a disk with this process.
    """

    def __init__(self, *urls: str, api_key: str | None = None, replica: int | None = None) -> None:
        """Args:
            urls: `http://host:port` of each server of the replica, not of a router.
            api_key: Key that is sent as `Authorization: Bearer`; the admin key if the server has one.
            replica: The replica's number; None for its position in `capture(engines=[...])`.

        Raises:
            ConfigError: one of `urls` is not a URL.
        """
        super().__init__(replica)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._servers = [Server(url, headers=headers) for url in urls]
        self._engines = [ServerTarget(server) for server in self._servers]

    @classmethod
    def behind(cls, router: str, *, api_key: str | None = None) -> list[SglangServer]:
        """Return one replica for each server behind a router. Asks the router, and blocks.

        Raises:
            EngineError: the router does not name its servers.
        """
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return [cls(url, api_key=api_key) for url in workers_of(router, headers=headers)]

    @property
    def world_size(self) -> int | None:
        """Return the sum of the servers' sizes, or None before they were requested."""
        known = [engine.known for engine in self._engines]
        sizes = [facts.world_size for facts in known if facts is not None]
        return sum(sizes) if len(sizes) == len(known) else None

    def counters(self) -> Sequence[CounterSource]:
        """Return the counters of all servers of the replica."""
        of, several = f"replica {self.replica or 0}", len(self._servers) > 1
        names = [f"{of} {server.url}" if several else of for server in self._servers]
        engines = zip(self._servers, names, strict=True)
        return [
            source
            for server, name in engines
            for source in EngineMetrics(partial(counters_of, server), name, blocks=True).sources()
        ]

    def _targets(self) -> Sequence[tuple[Target, str | None]]:
        if len(self._engines) == 1:
            return [(self._engines[0], None)]
        labels = [server.url.partition("://")[2] for server in self._servers]
        return list(zip(self._engines, labels, strict=True))
