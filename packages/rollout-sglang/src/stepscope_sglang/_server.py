"""SglangServer: the `EngineProfiler` of a replica behind HTTP, by `/start_profile` and `/stop_profile`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from stepscope.backends.counters import CounterSource
from stepscope.engines import pass_socket
from stepscope.engines.http import Answer, Server, workers_of
from stepscope.engines.metrics import EngineMetrics
from stepscope.engines.passes import unpacked_copy
from stepscope.errors import EngineError
from stepscope.files.passes import PassFile
from stepscope_sglang import _versions
from stepscope_sglang._capture.replica import ReplicaProfiler
from stepscope_sglang._driving.target import (
    ALREADY_RECORDING,
    EngineFacts,
    Target,
    counters_of,
    facts_of,
    refusal,
)
from stepscope_sglang._engine_side.states import rpd_in, v2_in

_ASK_S = 10.0

_REPLY_S = 600.0
"""Timeout of a stop. The server answers when the files are written, and does nothing else until then (up to
108 s were measured)."""

_NO_REASON = (b"", b"Internal Server Error")
"""Bodies of SGLang's answers with status 500 that give no reason, in all tested versions."""


class ServerTarget:
    """The target of a capture if the engine is an SGLang server.

    SGLang answers 500 without a reason both if it refuses a request and if it fails. If an answer has a
    reason, from a proxy or a newer version, the reason is used.
    """

    remote = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self.engine: object = server.url
        self.known: EngineFacts | None = None
        """The server's facts, or None before the server was asked for them."""

    def facts(self) -> EngineFacts:
        if self.known is None:
            info = self._ask()
            version = info.get("version")
            version = version if isinstance(version, str) else None
            states = info.get("internal_states")
            states = states if isinstance(states, list) else ()
            self.known = facts_of(
                info,
                version=version,
                options=_versions.options_of(version),
                profile_v2=v2_in(states),
                rpd=rpd_in(states),
            )
        return self.known

    def start(self, request: Mapping[str, object]) -> None:
        answer = self._server.request_now("POST", "/start_profile", request, timeout_s=_REPLY_S)
        self._expect_done("/start_profile", answer, f"profiling is {ALREADY_RECORDING}")

    def stop(self) -> None:
        answer = self._server.request_now("POST", "/stop_profile", timeout_s=_REPLY_S)
        self._expect_done("/stop_profile", answer, "it is not recording")

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        answer = self._ask(min(patience_s, _ASK_S)).get("internal_states")
        return answer if isinstance(answer, list) else ()

    def _ask(self, timeout_s: float = _ASK_S) -> dict[str, object]:
        path = "/server_info"
        answer = self._server.request_now("GET", path, timeout_s=timeout_s)
        if answer.status == 404:  # 0.5.5 and older, or a router
            self._refuse_router()
            path = "/get_server_info"
            answer = self._server.request_now("GET", path, timeout_s=timeout_s)
        self._expect_ok(path, answer)
        try:
            return msgspec.json.decode(answer.body, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{self._server.url}{path} does not answer as SGLang does: {answer.text}"
            ) from error

    def _refuse_router(self) -> None:
        """Raise EngineError if the server is a router.

        A router answers `/get_server_info` as a server does, but answers 404 to requests for profiling
        (sglang_router 0.3.2).
        """
        try:
            behind = workers_of(self._server.url, headers=self._server.headers, timeout_s=_ASK_S)
        except EngineError:  # a server has no list of servers, so this is no router
            return
        raise EngineError(
            f"{self._server.url} is a router before {', '.join(behind)}, and passes no profiling on to them. "
            f"Fix: *SglangServer.behind({self._server.url!r}), one replica for each server"
        )

    def _expect_done(self, path: str, answer: Answer, usual: str) -> None:
        """Raise an error unless the status is 200.

        Args:
            usual: Reason to assume for a status 500 without a reason.
        """
        if answer.status == 500:
            unsaid = answer.body in _NO_REASON
            guess = f": {usual}, or it failed (its log says which)" if unsaid else ""
            message = f"{self._server.url}{path} answered 500 {answer.text}{guess}"
            raise refusal(message, usual if unsaid else answer.text)
        self._expect_ok(path, answer)

    def _expect_ok(self, path: str, answer: Answer) -> None:
        if answer.status == 200:
            return
        fix = ""
        if answer.status == 404:
            self._refuse_router()
        elif answer.status in (401, 403):
            fix = ". Fix: SglangServer(url, api_key=...), the admin key where the server has one"
        raise EngineError(f"{self._server.url}{path} answered {answer.status} {answer.text}{fix}")


class SglangServer(ReplicaProfiler):
    """Profiler of an SGLang server, or of several servers that are one replica (prefill and decode servers).

    The servers write the files, so they must share a disk with this process.
    """

    def __init__(self, *urls: str, api_key: str | None = None, replica: int | None = None) -> None:
        """
        Args:
            urls: `http://host:port` of each server of the replica. A router's URL is refused.
            api_key: Key to send as `Authorization: Bearer`. If the servers have an admin key, pass the admin
                key.
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
        """Return one profiler for each server behind a router. Asks the router, and blocks.

        Raises:
            EngineError: the router does not name its servers.
        """
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return [cls(url, api_key=api_key) for url in workers_of(router, headers=headers)]

    @property
    def world_size(self) -> int | None:
        """Return the sum of the servers' sizes, or None before all servers were asked for their facts."""
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

    def keep_passes(self, memory_mb: int) -> bool:
        return pass_socket.keep_behind([server.url for server in self._servers], memory_mb)

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        contents = pass_socket.kept_behind([server.url for server in self._servers], start_ns)
        return [unpacked_copy(content).file() for content in contents]

    def _targets(self) -> Sequence[tuple[Target, str | None]]:
        if len(self._engines) == 1:
            return [(self._engines[0], None)]
        labels = [server.url.partition("://")[2] for server in self._servers]
        return list(zip(self._engines, labels, strict=True))
