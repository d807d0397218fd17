"""Engines behind HTTP: one request, its answer, and errors that say what to do. Nothing is ever sent twice.

It uses the standard library: a client library's pools and retries could repeat a start, and every process
would pay for its import. Each request has a thread, so that a server that hangs for minutes delays no other.
It also has a connection, which is shut down when the caller gives up.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from stepscope.engines.own_thread import own_thread
from stepscope.errors import ConfigError, EngineError

_CONNECT_S = 5.0
_ENGINE = re.compile(r"@\d+$")
_SAID = 300
"""Number of characters of a server's answer that are quoted in an error."""


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The answer in an error's message: on one line, and cut."""
        return " ".join(self.body.decode(errors="replace").split())[:_SAID]


class UnreachableError(EngineError):
    """The server did not receive the request, so nothing has happened there."""


class AnswerLostError(EngineError):
    """The request was sent and no answer came, so its effect may have happened."""


class Server:
    """One HTTP server. Requests may be made from any thread and any event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Args:
            url: `http://host:port`, also with a path before the engine's own. No proxy is used.
            headers: Headers of every request, such as Authorization.

        Raises:
            ConfigError: `url` is no URL.
        """
        self.url = url.rstrip("/")
        self.parts = _parts(self.url)
        self.headers = dict(headers or {})

    async def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> Answer:
        """Send a request without blocking the loop. If this is cancelled, the connection is shut down at
        once; the requested action may still happen on the server.
        """
        call = _Call(self, method, path, body, timeout_s)
        try:
            return await own_thread(call.request)
        except asyncio.CancelledError:
            call.give_up()
            raise

    def request_now(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> Answer:
        """Return the server's answer, whatever its status. Blocks.

        Args:
            body: Sent as JSON; None for none.
            timeout_s: Longest time without any data from the server, or None for no limit.

        Raises:
            UnreachableError: no connection.
            AnswerLostError: the connection ended, or the time was over, before the answer.
        """
        return _Call(self, method, path, body, timeout_s).request()

    def connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        return kind(self.parts.hostname or "", self.parts.port, timeout=_CONNECT_S)


class _Call:
    """One request on its own connection."""

    def __init__(self, server: Server, method: str, path: str, body: object, timeout_s: float | None) -> None:
        self._server = server
        self._method = method
        self._path = path
        self._body = None if body is None else msgspec.json.encode(body)
        self._timeout_s = timeout_s
        self._connection = server.connection()
        self._given_up = False

    def request(self) -> Answer:
        try:
            return self._answer()
        finally:
            self._connection.close()

    def give_up(self) -> None:
        self._given_up = True
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):  # it was closed a moment ago
                sock.shutdown(socket.SHUT_RDWR)

    def _answer(self) -> Answer:
        what = f"{self._method} {self._server.url}{self._path}"
        try:
            self._connection.connect()
        except OSError as error:
            raise UnreachableError(f"{what}: {_reason(error)}. Fix: is the server up at this URL?") from error
        if self._given_up:
            raise UnreachableError(f"{what}: given up before it was sent")
        self._connection.sock.settimeout(self._timeout_s)
        try:
            kind = {} if self._body is None else {"Content-Type": "application/json"}
            target, headers = f"{self._server.parts.path}{self._path}", kind | self._server.headers
            self._connection.request(self._method, target, self._body, headers)
            response = self._connection.getresponse()
            return Answer(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise AnswerLostError(f"{what}: no answer: {_reason(error)}") from error


def workers_of(
    router: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> list[str]:
    """Return the URLs of the servers behind a router (`sglang_router`, `vllm-router`), sorted. Blocks.

    The order of a router's list changes with each start of the router.

    A router passes each request to one of its servers, also a profiler's (vllm-router 0.1.17: the start to
    one, the stop to the next). So stepscope calls the servers one by one.

    Raises:
        EngineError: the router does not answer, or does not name its servers.
    """
    server = Server(router, headers=headers)
    answers = []
    for path in ("/workers", "/list_workers"):  # the second is what older routers have
        answer = server.request_now("GET", path, timeout_s=timeout_s)
        urls = _listed(answer) if answer.status == 200 else []
        if urls:
            return urls
        answers.append(f"GET {path}: {answer.status} {answer.text}")
    raise EngineError(
        f"{router} does not say which servers are behind it ({'; '.join(answers)}). "
        "Fix: ask again once it has found them, or pass the servers' own URLs"
    )


def _listed(answer: Answer) -> list[str]:
    """Return the URLs in `{"workers": [{"url": ...}]}` or `{"urls": [...]}`."""
    try:
        reply = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return []
    if not isinstance(reply, dict):
        return []
    workers = reply.get("workers") or reply.get("urls")
    if not isinstance(workers, Sequence):
        return []
    urls = [worker.get("url") if isinstance(worker, dict) else worker for worker in workers]
    # Of a server with data parallelism a router may name each engine: http://host:8000@0, http://host:8000@1.
    return sorted({_ENGINE.sub("", url) for url in urls if isinstance(url, str)}, key=_natural)


def _natural(url: str) -> list[str | int]:
    """Return a sort key by which `:8000` comes before `:10000`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", url)]


def _parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        port: int | None = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError("url", url, "http://host:port", "write the scheme too, e.g. http://127.0.0.1:8000")
    return parts


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__
