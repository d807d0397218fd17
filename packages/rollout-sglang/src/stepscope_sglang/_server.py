"""SglangServer: the profiler of a replica behind HTTP, through `/start_profile` and `/stop_profile`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.engines.http import Answer, Server, workers_of
from stepscope.errors import EngineError
from stepscope_sglang import _versions
from stepscope_sglang._capture.session import Line, RefusedError
from stepscope_sglang._driving.facts import EngineFacts, facts_of
from stepscope_sglang._engine_side.plugin import rpd_in, v2_in
from stepscope_sglang._profiler import Replica, check_facts

_ASK_S = 10.0
_REPLY_S = 600.0
"""A stop is answered when the files are written; the server does nothing else meanwhile (108 s were seen)."""
_NO_REASON = (b"", b"Internal Server Error")
"""SGLang's text of a 500, in all versions that we ran."""


class ServerLine:
    """A `Line`. SGLang answers 500, without a reason, both when it refuses and when it fails. One who gives a
    reason (a proxy, a newer version) is taken at its word.
    """

    remote = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self.engine: object = server.url
        self._facts: EngineFacts | None = None

    @property
    def known(self) -> EngineFacts | None:
        return self._facts

    def facts(self) -> EngineFacts:
        if self._facts is None:
            said = self._ask()
            version = said.get("version")
            version = version if isinstance(version, str) else None
            states = said.get("internal_states")
            states = states if isinstance(states, list) else ()
            self._facts = facts_of(
                said,
                version=version,
                options=_versions.options_of(version),
                profile_v2=v2_in(states),
                rpd=rpd_in(states),
            )
        return self._facts

    def start(self, request: Mapping[str, object]) -> None:
        answer = self._server.request_now("POST", "/start_profile", request, timeout_s=_REPLY_S)
        self._expect_done("/start_profile", answer, "profiling is already in progress")

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
        """Raise EngineError if this is a router: it answers `/get_server_info` like a server, and passes
        no profiling
        on (sglang_router 0.3.2: 404).
        """
        try:
            behind = workers_of(self._server.url, headers=self._server.headers(None), timeout_s=_ASK_S)
        except EngineError:  # a server names no servers
            return
        raise EngineError(
            f"{self._server.url} is a router before {', '.join(behind)}, and passes no profiling on to them. "
            f"Fix: *SglangServer.behind({self._server.url!r}), one replica for each server"
        )

    def _expect_done(self, path: str, answer: Answer, usual: str) -> None:
        """Args: usual: why SGLang refuses this, which is what a 500 without a reason most often means."""
        if answer.status == 500:
            guess = f": {usual}, or it failed (its log says which)" if answer.body in _NO_REASON else ""
            raise RefusedError(f"{self._server.url}{path} answered 500 {answer.text}{guess}")
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


class SglangServer(Replica):
    """Drives the profiler of an SGLang server, or of the several that make up one replica (prefill and decode
    servers). The files are written by the servers, so they need a disk in common with this process.
    """

    def __init__(self, *urls: str, api_key: str | None = None, replica: int | None = None) -> None:
        """
        Args:
            urls: `http://host:port` of each server of the replica. Not that of a router.
            api_key: Sent as `Authorization: Bearer`; the admin key where the server has one.
            replica: The replica's number; None for its position in `capture(engines=[...])`.

        Raises:
            ConfigError: one is no URL.
        """
        super().__init__(replica)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._servers = [Server(url, headers=headers) for url in urls]
        self._each = [ServerLine(server) for server in self._servers]

    @classmethod
    def behind(cls, router: str, *, api_key: str | None = None) -> list[SglangServer]:
        """One replica for each server that a router spreads requests over. Asks the router, and blocks.

        Raises:
            EngineError: it does not say which they are.
        """
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return [cls(url, api_key=api_key) for url in workers_of(router, headers=headers)]

    @property
    def world_size(self) -> int | None:
        """None until the servers were asked."""
        known = [line.known for line in self._each]
        sizes = [facts.world_size for facts in known if facts is not None]
        return sum(sizes) if len(sizes) == len(known) else None

    def check(self) -> None:
        for line in self._each:
            check_facts(line.facts())

    def _lines(self) -> Sequence[tuple[Line, str | None]]:
        if len(self._each) == 1:
            return [(self._each[0], None)]
        labels = [server.url.partition("://")[2] for server in self._servers]
        return list(zip(self._each, labels, strict=True))
