"""Tests of `live_server`, which starts the real servers, with Python's own HTTP server."""

from __future__ import annotations

import socket
from pathlib import Path

import live_server
import pytest


def words(port: int) -> list[str]:
    return [str(port), "--bind", "127.0.0.1"]


@pytest.mark.slow
def test_a_server_whose_port_is_taken_meanwhile_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = live_server._free_port()
    with socket.socket() as faster:
        faster.bind(("127.0.0.1", 0))
        faster.listen()
        ports = iter([faster.getsockname()[1], free])
        monkeypatch.setattr(live_server, "_free_port", lambda: next(ports))
        with live_server.serving(tmp_path, "http.server", words, "/") as live:
            assert live.url.endswith(f":{free}")


def test_a_server_that_ends_for_another_reason_is_not_started_again(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="unrecognized arguments"),
        live_server.serving(tmp_path, "http.server", lambda port: ["--no-such-option"], "/"),
    ):
        pass
