"""Requests to engines behind HTTP, and errors that state the fix. No request is ever sent twice.

This module uses the standard library, because a client library could repeat a start by its retries, and its
import would cost every process time. Each request has its own thread, so that a server that hangs delays no
other request. Each request also has its own connection, which is shut down when the caller gives up.
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
        """The body on one line, cut to the length that an error quotes."""
        return " ".join(self.body.decode(errors="replace").split())[:_SAID]


class UnreachableError(EngineError):
    """The server did not receive the request, so the request had no effect."""


class AnswerLostError(EngineError):
    """The request was sent and no answer came, so the request may have had its effect."""


class Server:
    """One HTTP server. Requests may be made from any thread and any event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """
        Args:
            url: `http://host:port`, or with a path, which is put before the path of each request. No proxy is
                used.
            headers: Headers of every request, such as Authorization.

        Raises:
            ConfigError: `url` is not an HTTP URL.
        """
        self.url = url.rstrip("/")
        self.parts = _parts(self.url)
        self.headers = dict(headers or {})

    async def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> Answer:
        """Send a request without blocking the event loop. If the caller is cancelled, the connection is shut
        down at once; the server may still perform the action.
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
            body: Object to send as JSON; None for no body.
            timeout_s: Longest time without any data from the server, or None for no limit.

        Raises:
            UnreachableError: the connection failed.
            AnswerLostError: the connection ended, or `timeout_s` passed, before the answer.
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
            with suppress(OSError):  # the connection may be closed already
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

    The URLs are sorted, because their order in a router's list changes whenever the router is started.

    A router passes each request to any one of its servers. vllm-router 0.1.17 passes the start of a profiler
    to one server and the stop to the next. So stepscope calls the servers one by one.

    Raises:
        EngineError: the router does not answer, or does not name its servers.
    """
    server = Server(router, headers=headers)
    answers = []
    for path in ("/workers", "/list_workers"):  # older routers have only the second path
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
    """Return the URLs in `{"workers": [{"url": ...}]}` or `{"urls": [...]}`, sorted; empty for any other
    answer.
    """
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
    # A router may list each data-parallel engine of a server: http://host:8000@0, http://host:8000@1.
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
