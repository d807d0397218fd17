"""VllmProfiler: the `EngineProfiler` of an `AsyncLLM` or an `LLM` in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary, ref

from stepscope import ProfileConfig
from stepscope.backends.counters import CounterSource
from stepscope.engines import EngineCapture, EngineFactory, EngineProfiler, name_settings
from stepscope.engines.metrics import EngineMetrics
from stepscope.engines.own_thread import own_thread, users_loop
from stepscope.errors import EngineError
from stepscope.files.passes import PassFile
from stepscope_vllm import _versions
from stepscope_vllm._arming import unedited
from stepscope_vllm._capture import options
from stepscope_vllm._capture.session import Desk, ReplicaProfiler
from stepscope_vllm._driving import ascend_profiler, discovery, target
from stepscope_vllm._driving.ascend_profiler import Ascend
from stepscope_vllm._driving.in_process import InProcessTarget
from stepscope_vllm._engine_side import plugin

_desks: WeakKeyDictionary[object, Desk] = WeakKeyDictionary()
"""{engine: its captures}, because each capture makes a new profiler. One writer: `VllmProfiler`."""


class VllmProfiler(ReplicaProfiler):
    """Profiler of one engine of this process. Drives vLLM's own profiler in all workers of the engine.

    The methods can be called from any event loop or thread. They call the engine on its own loop or thread.
    """

    def __init__(self, engine: object, *, replica: int | None = None) -> None:
        """
        Args:
            engine: An `AsyncLLM` or an `LLM`, built with `**engine_args(config, replica)`.
            replica: The replica's number; None for its position in `capture(engines=[...])`.

        Raises:
            EngineError: `engine` is neither an `AsyncLLM` nor an `LLM`.
        """
        if not discovery.is_engine(engine):
            kind = f"{type(engine).__module__}.{type(engine).__qualname__}"
            raise EngineError(f"{kind} is no vLLM engine. Fix: pass an AsyncLLM or an LLM")
        self.engine = engine
        super().__init__(replica, _desks.setdefault(engine, Desk()))
        self._target = InProcessTarget(engine)
        settings = target.settings_of(self._target.config)
        name_settings("vllm", settings, version=self._target.version, engine=True)

    @property
    def world_size(self) -> int:
        """Return tp * pp * dp."""
        return self._target.layout.size

    @property
    def processes(self) -> int:
        layout = self._target.layout
        return layout.size if layout.external else 1

    def check(self) -> None:
        target = self._target
        _versions.expect_supported(target.version)
        _ = target.dialect
        why = target.calls.dead()
        if why is not None:
            raise EngineError(f"{why}. Fix: start a new engine")
        options.refuse_disabled(target.settings)
        if (
            target.layout.pp > 1
            and not (ascend_profiler.is_here() or target.takes_aim())
            and plugin.is_missing()
        ):
            raise EngineError(plugin.MISSING)
        self._ignored = ascend_profiler.check(target.settings, target.environment)

    def counters(self) -> Sequence[CounterSource]:
        """Return the engine's counters. With `disable_log_stats=True`, only the number of unfinished requests
        has values.
        """
        engine = ref(self.engine)

        def read() -> dict[str, float]:
            living = engine()
            return {} if living is None else target.counters_here(living) | target.unfinished(living)

        return EngineMetrics(read, f"replica {self.replica or 0}", blocks=False).sources()

    def weakly(self) -> Callable[[], VllmProfiler | None]:
        engine, replica = ref(self.engine), self.replica

        def profiler() -> VllmProfiler | None:
            living = engine()
            return None if living is None else VllmProfiler(living, replica=replica)

        return profiler

    def keep_passes(self, memory_mb: int) -> bool:
        return self._target.keep_passes(memory_mb)

    def kept_passes(self, start_ns: int) -> list[PassFile]:
        return self._target.kept_passes(start_ns)

    def check_capture(self, capture: EngineCapture) -> Mapping[str, str]:
        return self._unable(capture, ascend_profiler.installed())

    async def start(self, capture: EngineCapture) -> None:
        ascend = await own_thread(ascend_profiler.installed)  # the first call reads source files
        self.check()
        ignored = self._unable(capture, ascend)
        self._target.calls.bind(users_loop())
        await self._begin(self._target, capture, ignored)

    def _unable(self, capture: EngineCapture, ascend: Ascend | None) -> dict[str, str]:
        target = self._target
        if capture.iterations.running is not None and not target.calls.asynchronous:
            raise EngineError(
                f"roles.rollout.engine.iterations.running is {capture.iterations.running}, and an LLM cannot "
                "be told to record while it generates. Fix: an AsyncLLM or a server, or leave `running` out"
            )
        ignored = options.unable(
            capture,
            target.settings,
            target.dialect,
            target.version,
            aimed=target.takes_aim(),
            ascend=ascend,
        )
        if target.in_this_process and capture.profile_memory:
            ignored["profile_memory"] = options.OTHER_THREAD
        return ignored


class VllmFactory(EngineFactory):
    """Adapter `vllm`. Recognises `AsyncLLM` and `LLM`, and finds such engines in this process."""

    distributions = (*_versions.DISTRIBUTIONS, "vllm-ascend")
    builder = unedited.BUILDER

    def arm(self, config: ProfileConfig, settings: object) -> None:
        unedited.arm(config, settings)

    def recognises(self, engine: object) -> bool:
        return discovery.is_engine(engine)

    def serving(self, url: str, config: ProfileConfig) -> EngineProfiler:
        from stepscope_vllm._server import VllmServer  # imported here: only servers need it

        return VllmServer(url, unedited.folder_of(config))

    def owned(self) -> Sequence[object]:
        return discovery.owned()

    def __call__(self, engine: object, replica: int) -> VllmProfiler:
        return VllmProfiler(engine, replica=replica)


factory = VllmFactory()
