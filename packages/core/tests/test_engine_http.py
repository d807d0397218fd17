"""Requests to an engine's server, against servers on this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stepscope.engines.http import Answer, AnswerLostError, Server, UnreachableError, workers_of
from stepscope.errors import ConfigError, EngineError


class Host:
    """A server whose answers a test sets, and which notes what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.seen: list[tuple[str, str, bytes, str | None]] = []
        self.came, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                host.seen.append((self.command, self.path, body, self.headers.get("Authorization")))
                host.came.set()
                host.go_on.wait(30)
                answer = host.answers.get(self.path, Answer(404, b"not here"))
                if answer.status == 0:
                    return  # the connection ends without a word
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_POST  # noqa: N815  # the name that http.server looks for

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


async def test_a_request_carries_its_body_and_headers_and_returns_any_status(host: Host) -> None:
    host.answers["/v/start"] = Answer(409, b"already\n active")
    server = Server(f"{host.url}/v/", headers={"Authorization": "Bearer x"})
    answer = await server.request("POST", "/start", {"a": 1})
    assert (answer.status, answer.text) == (409, "already active")
    assert host.seen == [("POST", "/v/start", b'{"a":1}', "Bearer x")]


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"POST {url}/start: .*refused"):
            await Server(url).request("POST", "/start")


async def test_a_connection_that_ends_without_an_answer_is_not_tried_again(host: Host) -> None:
    host.answers["/start"] = Answer(0, b"")
    with pytest.raises(AnswerLostError, match="no answer"):
        await Server(host.url).request("POST", "/start")
    assert len(host.seen) == 1


async def test_a_cancelled_request_ends_at_once_and_the_loop_beats_meanwhile(host: Host) -> None:
    host.go_on.clear()
    asking = asyncio.create_task(Server(host.url).request("POST", "/start"))
    await asyncio.to_thread(host.came.wait, 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_a_silent_server_ends_at_the_time_limit(host: Host) -> None:
    host.go_on.clear()
    with pytest.raises(AnswerLostError, match="timed out"):
        Server(host.url).request_now("GET", "/health", timeout_s=0.05)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="the scheme too"):
        Server(url)


def test_a_routers_servers_are_found_by_either_of_its_ways(host: Host) -> None:
    host.answers["/workers"] = Answer(200, b'{"workers": [{"url": "http://a:1"}, {"url": "http://b:2"}]}')
    assert workers_of(host.url) == ["http://a:1", "http://b:2"]
    del host.answers["/workers"]
    host.answers["/list_workers"] = Answer(200, b'{"urls": ["http://c:3"]}')
    assert workers_of(host.url) == ["http://c:3"]


def test_a_routers_servers_are_each_named_once_in_an_order_that_stays(host: Host) -> None:
    urls = ["http://a:10000@1", "http://b:1", "http://a:9000", "http://a:10000@0", "http://u:1@c:2"]
    for answer in (urls, urls[::-1]):
        host.answers["/list_workers"] = Answer(200, json.dumps({"urls": answer}).encode())
        assert workers_of(host.url) == ["http://a:9000", "http://a:10000", "http://b:1", "http://u:1@c:2"]


def test_a_router_that_names_no_server_says_so(host: Host) -> None:
    host.answers["/workers"] = Answer(200, b"<html>")
    with pytest.raises(EngineError, match="GET /list_workers: 404 "):
        workers_of(host.url)
