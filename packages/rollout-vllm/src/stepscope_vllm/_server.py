"""VllmServer: the `EngineProfiler` of a `vllm serve`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.backends.counters import CounterSource
from stepscope.engines import EngineCapture, pass_socket
from stepscope.engines.artifacts import Option
from stepscope.engines.http import Answer, AnswerLostError, Server, UnreachableError, workers_of
from stepscope.engines.metrics import EngineMetrics
from stepscope.engines.own_thread import own_thread
from stepscope.engines.passes import take
from stepscope.errors import EngineError
from stepscope.files.passes import PassFile
from stepscope_vllm import _versions
from stepscope_vllm._capture import options
from stepscope_vllm._capture.session import Desk, ReplicaProfiler
from stepscope_vllm._driving import target
from stepscope_vllm._driving.target import Started
from stepscope_vllm._engine_side import plugin
from stepscope_vllm._engine_side.passes import ALONE, file_of
from stepscope_vllm._files import engine_folder
from stepscope_vllm._files.traces import Layout
from stepscope_vllm._versions import Dialect

ASK_S = 10.0
"""Timeout of short requests: version, routes, metrics."""
_START_S = 60.0
"""Timeout of a start. The start waits for all workers, and each worker may be in a long prefill."""
_NEVER = 1 << 30
"""Number of iterations that no capture reaches."""
BUILT = (
    'Fix: serve it with `--profiler-config \'{"profiler": "torch", "torch_profiler_dir": "/a/shared/folder", '
    '"torch_profiler_with_stack": false, "ignore_frontend": true}\'` (stepscope_vllm.server_args), or with '
    "VLLM_TORCH_PROFILER_DIR set for vLLM 0.12 and older"
)


class ServerTarget:
    """The target of a capture if the engine is a `vllm serve`."""

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
        """Names of the API server's own traces that existed before the start."""

    def facts(self) -> dict[str, Option]:
        layout: dict[str, Option] = {"url": self._server.url}
        try:
            answer = self._server.request_now("GET", "/metrics", timeout_s=ASK_S)
        except EngineError:
            return layout  # the start or the stop will report the error
        return {**layout, **target.scheduler(answer.body.decode(errors="replace"))}

    def take_passes(self) -> Sequence[PassFile]:
        """Return the notes of passes in the files that the server's plugin wrote, and remove the files."""
        return take(self.folder, f"{self._name}_*")

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started:
        body: dict[str, object] = {}
        self._name = name
        self._frontends = await asyncio.to_thread(engine_folder.of_frontends, self.folder)
        if self._dialect.prefix == "every start":
            body["profile_prefix"] = name if capture.profiler else f"{name}{ALONE}"
        if not capture.profiler:
            # A server without the plugin would record, so its recording begins after `_NEVER` passes.
            body["delay_iterations"], body["max_iterations"] = _NEVER, 1
        elif self._dialect.bounds:
            body["delay_iterations"] = capture.iterations.start
            body["max_iterations"] = capture.iterations.count or 0
        try:
            answer = await self._server.request("POST", "/start_profile", body or None, timeout_s=_START_S)
        except UnreachableError:
            raise
        except AnswerLostError:
            # The recording may have begun. One stop is harmless, but a second would crash an older server
            # that records its front end.
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
                return {}  # other code stopped the profiler; before vLLM 0.31, a second stop ends the server
        answer = await self._server.request("POST", "/stop_profile")  # may take minutes; the caller limits it
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
    return target.counters(answer.body.decode(errors="replace"))


def as_object(answer: Answer) -> dict[str, object]:
    """Return the JSON object in an answer; empty if the answer contains no JSON object."""
    try:
        value = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


log = logging.getLogger("stepscope")

_desks: dict[str, Desk] = {}
"""{URL of a server: its captures}. The captures are kept here, because a loop may create a new profiler for
each capture. One writer: `VllmServer`."""

_warned: set[str] = set()
"""URLs of the servers about whose pipelines a warning was logged. One writer: `VllmServer.check`."""


class VllmServer(ReplicaProfiler):
    """Profiler of one `vllm serve`, which stepscope drives by the routes /start_profile and /stop_profile.

    vLLM's `--api-key` does not protect these routes, so do not expose the server's port.
    """

    def __init__(
        self,
        url: str,
        profile_dir: str | os.PathLike[str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        replica: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        prefill_context_parallel_size: int = 1,
    ) -> None:
        """
        Args:
            url: `http://host:port` of the server itself. For the servers of a router, use `behind`.
            profile_dir: The server's `torch_profiler_dir`, as this process sees it, or None to ask the
                server, which answers in development mode only (VLLM_SERVER_DEV_MODE=1).
            replica: The replica's number; None for its position in `capture(engines=[...])`.
            tensor_parallel_size, pipeline_parallel_size, data_parallel_size, prefill_context_parallel_size:
                The sizes that the server was started with.
            headers: Headers of every request.

        Raises:
            ConfigError: `url` is not a URL.
        """
        self._headers = dict(headers or {})
        self._server = Server(url, headers=self._headers)
        super().__init__(replica, _desks.setdefault(self._server.url, Desk()))
        self._layout = Layout(
            tensor_parallel_size,
            pipeline_parallel_size,
            data_parallel_size,
            False,
            prefill_context_parallel_size,
        )
        self._folder = None if profile_dir is None else Path(profile_dir).absolute()
        self._below = False
        """True if the server may write to a folder in `_folder`. The capture's files then show which
        folder."""
        self._direct = False
        """True if the server is known not to be a router."""
        self._version = "unknown"
        self._dialect: Dialect | None = None

    @classmethod
    def behind(
        cls,
        router: str,
        profile_dir: str | os.PathLike[str] | Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        **parallel: int,
    ) -> list[VllmServer]:
        """Return one profiler for each server behind a router, sorted by URL. Blocks.

        Args:
            profile_dir: One folder, if all servers write to it or to folders in it (`replica0`, `replica1`...
                of `server_args`). This needs vLLM 0.32 or newer, in which a start can set the file names. Or
                the folder of each server: `{"http://host:port": "/a/folder"}`.
            parallel: `tensor_parallel_size` and the other sizes, which are the same for all servers.

        Raises:
            EngineError: the router does not name its servers, or `profile_dir` lacks a server.
        """
        servers = []
        for url in workers_of(router, headers=headers):
            folder = profile_dir.get(url) if isinstance(profile_dir, Mapping) else profile_dir
            if folder is None and isinstance(profile_dir, Mapping):
                raise EngineError(
                    f"profile_dir has no folder for {url}, which is behind {router}; it has: "
                    f"{', '.join(profile_dir)}. Fix: add the torch_profiler_dir that it was served with"
                )
            server = cls(url, folder, headers=headers, **parallel)
            server._below = folder is not None and not isinstance(profile_dir, Mapping)
            servers.append(server)
        return servers

    @property
    def world_size(self) -> int:
        return self._layout.size

    def counters(self) -> Sequence[CounterSource]:
        of = f"replica {self.replica or 0}"
        return EngineMetrics(lambda: counters_of(self._server), of, blocks=True).sources()

    def keep_passes(self, memory_mb: int) -> bool:
        return pass_socket.keep_behind([self._server.url], memory_mb)

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        return [file_of(content) for content in pass_socket.kept_behind([self._server.url], start_ns)]

    def check(self) -> None:
        self._refuse_a_router()
        self._version = self._ask_version()
        _versions.expect_supported(self._version)
        self._dialect = self._ask_dialect()
        if (
            self._layout.pp > 1
            and _versions.leaves_sends_open(self._version)
            and self._server.url not in _warned
        ):
            _warned.add(self._server.url)
            log.warning("%s: %s", self._server.url, plugin.OF_A_SERVER)
        if self._folder is None:
            self._folder = self._ask_folder()
        if self._below and self._dialect.prefix != "every start":
            raise EngineError(
                f"{self._unnamed()}, so nobody knows which folder in {self._folder} is that of "
                f"{self._server.url}. Fix: "
                f"VllmServer.behind(router, {{{self._server.url!r}: '/its/torch_profiler_dir', ...}})"
            )

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        if self._dialect is None or self._folder is None:
            self.check()
        if self._dialect is None:
            raise EngineError("the server was not checked")
        if not capture.profiler and not (self._dialect.prefix == "every start" and self._dialect.bounds):
            raise EngineError(
                f"roles.rollout.engine.profiler is passes, and {self._unnamed()}, which passes alone need. "
                "Fix: vLLM 0.32.0 or later, or engine.profiler: on"
            )
        return options.unable(capture, {}, self._dialect, self._version, aimed=False)

    async def start(self, capture: EngineCapture) -> None:
        ignored = dict(await own_thread(self.check_capture, capture))
        if self._dialect is None or self._folder is None:
            raise EngineError("the server was not checked")
        if self._dialect.prefix == "every start":  # so that servers may share a folder
            capture = msgspec.structs.replace(capture, name=f"{capture.name}_replica{capture.replica}")
        else:
            self._refuse_a_shared_folder(self._folder)
        target = ServerTarget(
            self._server, self._dialect, self._folder, self._layout, self._version, below=self._below
        )
        await self._begin(target, capture, ignored)

    def _refuse_a_shared_folder(self, folder: Path) -> None:
        for url, desk in _desks.items():
            other = desk.current
            if desk is not self._desk and other is not None and other.recording.target.folder == folder:
                raise EngineError(
                    f"{url} is recorded and writes to {folder} too, and {self._unnamed()}. Fix: serve each "
                    "with a torch_profiler_dir of its own"
                )

    def _unnamed(self) -> str:
        return f"vLLM {self._version} does not name its files as it is told (0.32.0 does)"

    # The methods below ask the server, and block.

    def _refuse_a_router(self) -> None:
        """Raise EngineError if the URL is a router's, because a router may pass the stop to another server
        than the start.
        """
        if self._direct:
            return
        try:
            urls = workers_of(self._server.url, headers=self._headers)
        except (UnreachableError, AnswerLostError):
            raise
        except EngineError:
            self._direct = True
            return
        raise EngineError(
            f"{self._server.url} is a router: it gives a start to one server and the stop to the next. "
            f"Fix: VllmServer.behind({self._server.url!r}, profile_dir), or a VllmServer for each of: "
            f"{', '.join(urls)}"
        )

    def _ask(self, path: str) -> Answer:
        return self._server.request_now("GET", path, timeout_s=ASK_S)

    def _ask_version(self) -> str:
        answer = self._ask("/version")
        version = as_object(answer).get("version")
        if answer.status != 200 or version is None:
            raise EngineError(
                f"GET {self._server.url}/version: {answer.status} {answer.text}: no vLLM answers there. "
                "Fix: the URL of the server itself; for a router VllmServer.behind(url)"
            )
        return str(version)

    def _ask_dialect(self) -> Dialect:
        """Return the dialect, from the routes that the server documents, else from the server's version."""
        answer = self._ask("/openapi.json")
        document = as_object(answer)
        if answer.status != 200 or "paths" not in document:
            return _versions.dialect_of_version(self._version)
        paths = document["paths"]
        if not isinstance(paths, dict) or "/start_profile" not in paths:
            raise EngineError(f"{self._server.url} has no /start_profile: its profiler is off. {BUILT}")
        text = answer.body.decode(errors="replace")
        fields = ("profile_prefix", "delay_iterations", "max_iterations")
        return _versions.dialect_of([field for field in fields if f'"{field}"' in text])

    def _ask_folder(self) -> Path:
        answer = self._ask("/server_info?config_format=json")
        config = as_object(answer).get("vllm_config")
        profiler = config.get("profiler_config") if isinstance(config, dict) else None
        folder = profiler.get("torch_profiler_dir") if isinstance(profiler, dict) else None
        if not folder:
            raise EngineError(
                f"{self._server.url} does not say where it writes its traces. Fix: VllmServer(url, "
                "profile_dir='...'), the torch_profiler_dir that it was served with"
            )
        return Path(str(folder))
