"""The socket of an engine's scheduling process, with real processes behind a real port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from stepscope.engines import pass_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sockets are Linux's")
SERVER = """
import http.server, multiprocessing, time
from stepscope.engines import pass_socket

def kept(since_ns):
    return None if since_ns > 9 else b"x" * 3_000_000 + b"%d" % since_ns

def schedule(ready):
    pass_socket.listen({pass_socket.KEPT: kept})
    ready.set()
    time.sleep(99)

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    scheduler = fork.Process(target=schedule, args=(ready,), daemon=True)
    scheduler.start()
    ready.wait()
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    print(scheduler.pid, server.server_port, flush=True)
    server.serve_forever()
"""


class Server(NamedTuple):
    pid: int
    scheduler: int
    url: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        scheduler, port = map(int, process.stdout.readline().split())
        yield Server(process.pid, scheduler, f"http://127.0.0.1:{port}")
        os.killpg(process.pid, signal.SIGKILL)


def test_the_process_that_schedules_is_found_behind_the_servers_port(server: Server) -> None:
    assert pass_socket.behind(server.url) == [server.pid, server.scheduler]
    assert pass_socket.kept_behind([server.url], 5) == [b"x" * 3_000_000 + b"5"]
    assert pass_socket.kept_behind([server.url], 10) == []


def test_a_port_on_which_nobody_listens_is_asked_again_later() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert pass_socket.behind(url) == []
        assert not pass_socket.keep_behind([url], 1)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_server_of_another_host_is_not_asked(host: str) -> None:
    assert pass_socket.behind(f"http://{host}:80") is None
    assert pass_socket.keep_behind([f"http://{host}:80"], 1)
    assert pass_socket.kept_behind([f"http://{host}:80"], 0) == []


def test_a_failed_answer_has_its_reason_and_the_process_goes_on(server: Server) -> None:
    for _ in range(2):
        with pytest.raises(ConnectionError, match=f"{server.scheduler} could not answer 'keep': KeyError"):
            pass_socket.ask(server.scheduler, pass_socket.KEEP, 1)
    assert pass_socket.ask(server.scheduler, pass_socket.KEPT, 10) is None


def test_processes_that_do_not_listen_are_left_out(server: Server) -> None:
    assert pass_socket.ask_all([os.getpid(), server.scheduler], pass_socket.KEPT, 10) == [None]
    assert pass_socket.ask_all([os.getpid()], pass_socket.KEPT, 10) is None
