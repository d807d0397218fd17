"""SGLang's own server and router, each in a process group of its own, and a request to generate."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from tiny_sglang import settings, write_model

_UP_S = 500
_TRIES = 5
_TAKEN = re.compile("address (is )?already in use|port .*(is not available|is used by|already in use)", re.I)
"""Messages of uvicorn, SGLang and its router if another process took the port first."""


class PortTakenError(Exception):
    """Another process took the port after it was found free, before the server used it."""


class Live(NamedTuple):
    url: str
    group: int
    """Id of the server's process group."""


@contextmanager
def live_server(folder: Path, **changes: object) -> Iterator[Live]:
    """Provide a server of the tiny model, with `changes` of its settings."""
    model = write_model(folder / "model")

    def words(port: int) -> list[str]:
        known = {"host": "127.0.0.1", "port": port, "skip_server_warmup": True, **changes}
        return _words(settings(model, **known))

    with serving(folder, "sglang.launch_server", words, "/health") as live:
        yield live


@contextmanager
def live_router(folder: Path, *words: str) -> Iterator[str]:
    """Provide the URL of sglang's router. `words` are its arguments, which name the servers."""
    servers = sum(word.startswith("http://") for word in words)
    known = f'"total":{servers},'.encode()  # the router answers before it has found its servers

    def ours(port: int) -> list[str]:
        ports = ["--port", str(port), "--prometheus-port", str(_free_port())]
        return ["--host", "127.0.0.1", *ports, *words]

    with serving(folder, "sglang_router.launch_router", ours, "/workers", known) as live:
        yield live.url


@contextmanager
def serving(
    folder: Path, module: str, words: Callable[[int], Sequence[str]], health: str, sign: bytes = b""
) -> Iterator[Live]:
    """Run `module` with the arguments `words(port)`. If the port is taken meanwhile, use another port."""
    with ExitStack() as running:
        for _ in range(_TRIES):
            port = _free_port()
            url = f"http://127.0.0.1:{port}"
            with suppress(PortTakenError):
                group = running.enter_context(_running(folder, module, words(port), url + health, sign))
                break
        else:
            raise PortTakenError((folder / "log").read_text()[-3000:])
        yield Live(url, group)


@contextmanager
def _running(
    folder: Path, module: str, words: Sequence[str], health: str, sign: bytes = b""
) -> Iterator[int]:
    """Run `module`, and provide its process group once the answer of `health` contains `sign`."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(health, sign, process, folder / "log")
        yield process.pid
    finally:
        with suppress(ProcessLookupError):  # the server has already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, tokens: int, **more: object) -> dict[str, Any]:
    """Return a server's answer to one prompt. `more` are further fields of the request."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, **more}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return cast(dict[str, Any], json.loads(reply.read()))


def _words(options: dict[str, Any]) -> list[str]:
    """Return options as arguments: `--max-total-tokens 4096 --sleep-on-idle`."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return [
        word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])
    ]


def _wait_for(health: str, sign: bytes, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            ended = log.read_text()
            assert _TAKEN.search(ended), ended[-3000:]
            raise PortTakenError(ended[-3000:])
        try:
            with urllib.request.urlopen(health, timeout=2) as answer:
                if sign in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)  # there is no event to wait for when a server comes up
    raise TimeoutError(log.read_text()[-3000:])
