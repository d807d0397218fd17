"""The target of a capture that is a `vllm serve`, reached over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option
from stepscope.engines.http import Answer, AnswerLostError, Server, UnreachableError
from stepscope.engines.passes import take
from stepscope.errors import EngineError
from stepscope.files.passes import SUFFIX, PassFile
from stepscope_vllm._driving import facts
from stepscope_vllm._driving.target import Started
from stepscope_vllm._files import engine_folder
from stepscope_vllm._files.ranks import Layout
from stepscope_vllm._versions import Dialect

ASK_S = 10.0
"""The timeout of short requests: version, routes, metrics."""
_START_S = 60.0
"""Timeout of a start, which waits for all workers, of which each may be in a long prefill."""
BUILT = (
    'Fix: serve it with `--profiler-config \'{"profiler": "torch", "torch_profiler_dir": "/a/shared/folder", '
    '"torch_profiler_with_stack": false, "ignore_frontend": true}\'` (stepscope_vllm.server_args), or with '
    "VLLM_TORCH_PROFILER_DIR set for vLLM 0.12 and older"
)


class ServerTarget:
    """One `vllm serve`."""

    def __init__(
        self,
        server: Server,
        dialect: Dialect,
        folder: Path,
        layout: Layout,
        version: str,
        *,
        below: bool,
    ) -> None:
        self._server = server
        self._dialect = dialect
        self.folder = folder
        self._below = below
        self._name = ""
        self.layout = layout
        self.version = version
        self.reports: Sequence[Mapping[str, object]] = ()
        self.settings: Mapping[str, object] = {}
        self._frontends: set[str] = set()
        """Names of the API server's own traces from before the start."""

    def facts(self) -> dict[str, Option]:
        layout: dict[str, Option] = {"url": self._server.url}
        try:
            answer = self._server.request_now("GET", "/metrics", timeout_s=ASK_S)
        except EngineError:
            return layout  # the start or the stop reports what is wrong
        return {**layout, **facts.scheduler(answer.body.decode(errors="replace"))}

    def take_passes(self) -> Sequence[PassFile]:
        """Return the notes that the server's plugin left in its folder, and remove the files."""
        return take(self.folder, f"{self._name}_*{SUFFIX}")

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started:
        body: dict[str, object] = {}
        self._name = name
        self._frontends = await asyncio.to_thread(engine_folder.of_frontends, self.folder)
        if self._dialect.prefix == "every start":
            body["profile_prefix"] = name
        if self._dialect.bounds:
            body["delay_iterations"] = capture.iterations.start
            body["max_iterations"] = capture.iterations.count or 0
        try:
            answer = await self._server.request("POST", "/start_profile", body or None, timeout_s=_START_S)
        except UnreachableError:
            raise
        except AnswerLostError:
            # It may have begun. One stop is harmless; a second would end an older server with a frontend.
            await self._server.request("POST", "/stop_profile", timeout_s=_START_S)
            raise
        if answer.status == 409:
            raise EngineError(
                f"{self._server.url} profiles already: somebody else started it, or a process that ended "
                f"did. Fix: curl -X POST {self._server.url}/stop_profile, then capture"
            )
        self._refuse_failure("start_profile", answer)
        return Started(self.folder, named=self._dialect.prefix == "every start", aimed=False)

    async def stop(self) -> dict[str, str]:
        if not self._dialect.guarded:
            frontends = await asyncio.to_thread(engine_folder.of_frontends, self.folder)
            if frontends - self._frontends:
                return {}  # somebody has stopped it: before vLLM 0.31 one more ends the server
        answer = await self._server.request("POST", "/stop_profile")  # takes minutes; the caller's deadline
        self._refuse_failure("stop_profile", answer)
        if self._below:
            self.folder = await asyncio.to_thread(engine_folder.holder, self.folder, f"{self._name}_")
        return {}

    def _refuse_failure(self, what: str, answer: Answer) -> None:
        if answer.status == 404:
            raise EngineError(f"{self._server.url} has no /{what}: its profiler is off. {BUILT}")
        if answer.status != 200:
            raise EngineError(f"POST {self._server.url}/{what}: {answer.status} {answer.text}")


def counters_of(server: Server) -> dict[str, float]:
    """Return the counters of a server.

    Raises:
        EngineError: the server does not answer.
    """
    answer = server.request_now("GET", "/metrics", timeout_s=ASK_S)
    return facts.counters(answer.body.decode(errors="replace"))


def as_object(answer: Answer) -> dict[str, object]:
    """Return the JSON object in an answer; empty if the answer holds none."""
    try:
        value = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
