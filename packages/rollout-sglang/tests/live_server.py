"""SGLang's own server in a process group of its own, and a generation asked of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from tiny_sglang import settings, write_model

_UP_S = 500


class Live(NamedTuple):
    url: str
    group: int
    """The process group."""


@contextmanager
def live_server(folder: Path, **changes: object) -> Iterator[Live]:
    """A server of the tiny model. `changes` go to its settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    known = {"host": "127.0.0.1", "port": port, "skip_server_warmup": True, **changes}
    options = settings(write_model(folder / "model"), **known)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *_words(options)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, folder / "log")
        yield Live(url, process.pid)
    finally:
        with suppress(ProcessLookupError):  # somebody has ended it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, tokens: int, **more: object) -> dict[str, Any]:
    """The answer to one prompt. `more` goes into the request."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, **more}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return cast(dict[str, Any], json.loads(reply.read()))


def _words(options: dict[str, Any]) -> list[str]:
    """As `--max-total-tokens 4096 --sleep-on-idle`."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return [
        word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])
    ]


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # a server has no event for being up
        else:
            return
    raise TimeoutError(log.read_text()[-3000:])
