"""verl's `DistProfiler`, with stepscope behind it: a verl checkout changes one import.

    # was: from verl.utils.profiler import DistProfiler, DistProfilerExtension
    from stepscope.integrations.verl_dist_profiler import DistProfiler, DistProfilerExtension

`start_profile` on a worker opens a capture of `profile_step` in it, `stop_profile` closes it, and annotated
methods are its stages. docs/verl.md says what stays, what is different and what comes on top. Names and
signatures are verl's, v0.5 to v0.9.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from stepscope._recording.after.hooks import advance
from stepscope._recording.capture.capture import Capture, capture
from stepscope._recording.process import failures
from stepscope._recording.spans import decorator, slot
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files import switch

F = TypeVar("F", bound=Callable[..., Any])

_capture: Capture | None = None
"""The capture of this process. verl nests workers in one process, each with a profiler: the first that is
started opens the capture for all. One writer: `DistProfiler`.
"""


class DistProfiler:
    """One per verl worker."""

    def __init__(
        self,
        rank: int,
        config: object = None,
        tool_config: object = None,
        save_file_prefix: str | None = None,
        **kwargs: object,
    ) -> None:
        """As verl's.

        Args:
            config: verl's `ProfilerConfig` of the role: dataclass, `DictConfig` or mapping. None: disabled.
            tool_config: The options of its tool; None: those in `config`.
            save_file_prefix: The worker's role; it is the role of the spans and traces.

        Raises:
            ConfigError: `config` asks for what stepscope does not have.
        """
        self.rank = rank
        self.config = config
        self.tool_config = _get(config, "tool_config") if tool_config is None else tool_config
        self.save_file_prefix = save_file_prefix
        self.role = save_file_prefix or "worker"
        self._enabled = bool(_get(config, "enable")) and not switch.DISABLED
        self._opened: Capture | None = None
        self._profile = self._read() if self._enabled else None

    @property
    def opened(self) -> bool:
        """Return whether the capture of this process is one that this profiler opened."""
        return self._opened is not None

    def check_enable(self) -> bool:
        """Return whether the configuration enables profiling of this role."""
        return self._enabled

    def check_this_rank(self) -> bool:
        """Return whether a profiler runs on this rank. Spans are recorded on all."""
        decided = None if self._profile is None else self._profile.role(self.role)
        if decided is None or not decided[1].profiler:
            return False
        ranks = decided[1].ranks
        return ranks == "all" or (self.rank == 0 if ranks == "first" else self.rank in ranks)

    def check_this_step(self) -> bool:
        """Return whether this process is being captured."""
        return slot.session() is not None

    def is_discrete_mode(self) -> bool:
        """Return whether each stage has a trace of its own."""
        return self._profile is not None and self._profile.mode == "discrete"

    def start(self, **kwargs: object) -> None:
        """Open the capture of the step `profile_step`, if the role is enabled and none is open here.

        During a run: what goes wrong is logged, and stands in the manifest where there is one.
        """
        global _capture
        if self._profile is None or _capture is not None or slot.session() is not None:
            return
        step = kwargs.get("profile_step", kwargs.get("global_step"))
        if (
            step is None
        ):  # v0.5 tells only some of its workers. A guess would file the traces under a wrong step
            failures.warn("stepscope: %s is not recorded: start_profile got no profile_step", self.role)
            return
        try:
            opened = capture(int(str(step)), config=self._profile, role=self.role, rank=self.rank)
            _capture = self._opened = opened.open()
        except ours() as error:
            failures.note("opening a capture for verl", error)

    def stop(self, run_command: bool = True) -> None:
        """Close the capture that this profiler's `start` opened. `run_command` does nothing."""
        global _capture
        opened, self._opened = self._opened, None
        if opened is not None:
            _capture = None
            opened.close()

    def step(self) -> None:
        """One mini-batch is done: walks the schedule, if there is one."""
        advance()

    def run_finish_hook(self, run_command: bool = True) -> None:
        """verl's; nothing is left to do here: `finish_hook_cmd` runs by itself after each capture."""

    @classmethod
    def annotate(
        cls,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        **kwargs: object,
    ) -> Callable[[F], F]:
        """Time a method, sync or async, as a stage of its worker's role.

        The stage is verl's `role` (`actor_update`), else `message`, else the method's name. Color, domain and
        category have no meaning here.
        """
        named = kwargs.get("role") or message

        def decorate(fn: F) -> F:
            if switch.DISABLED:
                return fn
            return cast(F, _annotated(fn, str(named) if named else fn.__name__))

        return decorate

    def _read(self) -> ProfileConfig:
        """Return verl's block of one role as this process' configuration. verl selects the steps."""
        block = {**_plain(self.config), "enable": True}
        tool = block.get("tool")
        if self.tool_config is not None and tool:
            block["tool_config"] = {str(tool): _plain(self.tool_config)}
        given = {
            "global_profiler": {
                **{name: value for name, value in block.items() if name.startswith("finish_hook_")},
                "tool": tool,
                "save_path": block.get("save_path"),
                "steps": [0],
            },
            "actor_rollout_ref": {"actor": {"profiler": block}},
        }
        read = ProfileConfig.from_verl(given)
        return read.replace(steps=["every:1"], roles={self.role: read.roles["actor"]})


def _annotated(fn: Callable[..., Any], stage: str) -> Callable[..., Any]:
    """Return `fn`, timed under the role of the worker it is called on."""
    by_role: dict[str, Callable[..., Any]] = {}

    def timed(worker: object) -> Callable[..., Any]:
        role = getattr(getattr(worker, "profiler", None), "role", "worker")
        if role not in by_role:
            by_role[role] = fn
            try:
                by_role[role] = cast(
                    "Callable[..., Any]", decorator.timed(fn, role=role, stage=stage, attrs=None)
                )
            except TypeError as error:  # verl annotates whatever can be called
                failures.note(f"timing {stage}", error)
        return by_role[role]

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(worker: object, /, *args: object, **kwargs: object) -> object:
            call = fn if slot.active is None else timed(worker)
            return await call(worker, *args, **kwargs)

        return run_async

    @functools.wraps(fn)
    def run(worker: object, /, *args: object, **kwargs: object) -> object:
        call = fn if slot.active is None else timed(worker)
        return call(worker, *args, **kwargs)

    return run


def _register(method: F) -> F:
    """Mark a method as verl does: its worker groups call no others on every rank."""
    try:
        from verl.single_controller.base.decorator import Dispatch, register
    except ImportError:  # used without verl, in a trainer of the same shape
        return method
    return cast(F, register(dispatch_mode=Dispatch.ONE_TO_ALL)(method))


class DistProfilerExtension:
    """Base class of a verl worker, by which its trainer starts and stops profiling."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @_register
    def start_profile(self, **kwargs: object) -> None:
        """Open the capture on this rank."""
        self.profiler.start(**kwargs)

    @_register
    def stop_profile(self, run_command: bool = True) -> None:
        """Close the capture."""
        self.profiler.stop(run_command=run_command)

    @_register
    def step_profile(self) -> None:
        """One mini-batch is done."""
        self.profiler.step()


def _get(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _plain(config: object) -> dict[str, Any]:
    """Return the fields of a mapping, a dataclass or a `DictConfig`, nested ones too."""
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        return cast("dict[str, Any]", OmegaConf.to_container(cast(Any, config), resolve=True))
    if isinstance(config, Mapping):
        return dict(config)
    fields = {name: getattr(config, name) for name in getattr(config, "__dataclass_fields__", ())}
    known = {name: value for name, value in fields.items() if value != "???"}  # OmegaConf's MISSING
    return {
        name: _plain(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in known.items()
    }
