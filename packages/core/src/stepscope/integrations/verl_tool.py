"""The profiler tool `stepscope` in verl: `global_profiler.tool=stepscope`, with the options of `torch`.

In a PPO trainer, the driver captures whole steps, with the preset `verl` and the settings of verl's profiler.
In other trainers, the `DistProfiler` of each worker opens its own captures, of the steps and on the ranks
that verl selects.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import wrapt
from omegaconf import OmegaConf

from stepscope._recording.capture import configure
from stepscope._recording.capture.capture import Capture, capture
from stepscope._recording.process import failures
from stepscope._recording.session.hooks import advance
from stepscope._recording.spans import api, slot
from stepscope.config import ProfileConfig, resolve
from stepscope.errors import ours
from stepscope.integrations import verl

if TYPE_CHECKING:
    from types import ModuleType

    from omegaconf import DictConfig

TOOL = "stepscope"
"""Name of the tool in verl's configuration."""
_AS_TORCH = {"tool": "torch", "finish_hook_cmd": None}
"""New values for each block of verl's configuration whose tool is `stepscope`. Without `finish_hook_cmd`,
stepscope does not run the finish command, which verl runs itself."""
_SPANS_ALONE: Mapping[str, object] = {"*": {"profiler": "off", "engine": {"profiler": "off"}}}

Method = Callable[..., Any]

_capture: Capture | None = None
"""The capture that a worker of this process has opened, or None. verl may place several workers in one
process: the first worker that starts opens the capture for all. One writer: `WorkerProfiler`."""


def extend(module: ModuleType) -> None:
    """Add the tool to the PPO trainers or the `DistProfiler` in verl's module. verl has no function for
    this.
    """
    for name, wrapper in (
        ("PPOTrainer", _make_trainer),
        ("RayPPOTrainer", _make_trainer),
        ("DistProfiler", _make_profiler),
    ):
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
            wrapt.wrap_function_wrapper(module, f"{name}.__init__", wrapper)


def _make_trainer(
    make: Callable[..., None], trainer: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    make(*args, **kwargs)
    if OmegaConf.select(trainer.config, "global_profiler.tool") == TOOL:
        config = configure.configure(read_config(trainer.config))
        try:
            verl.publish(config)
        except ours() as error:  # workers get the configuration with the first capture instead
            failures.note("publishing the configuration for verl's workers", error)


def read_config(config: DictConfig) -> ProfileConfig:
    """Return verl's profiler settings as a configuration of stepscope, with the preset `verl`, so that whole
    steps are captured.

    verl's settings are used instead of a configuration file of stepscope. The variables `STEPSCOPE_*`
    override verl's settings. If verl does not enable the profiler of any role, only spans are recorded.

    Args:
        config: The configuration that verl's trainer gets.

    Raises:
        ConfigError: as `ProfileConfig.from_verl`.
    """
    tree = _as_torch(OmegaConf.to_container(config, resolve=True))
    overall = tree["global_profiler"]
    steps, overall["steps"] = overall.get("steps") or [], []
    verls = ProfileConfig.from_verl(tree)
    any_enabled = verls.roles != ProfileConfig().roles
    roles = verls.to_mapping()["roles"] if any_enabled else _SPANS_ALONE
    return resolve({**verls.to_settings(), "steps": steps, "roles": roles, "instrument": ["verl"]})


def _as_torch(tree: Any) -> Any:
    """Return a copy of verl's configuration in which blocks of this tool are blocks of the tool `torch`."""
    if not isinstance(tree, dict):
        return tree
    block = {**tree, **_AS_TORCH} if tree.get("tool") == TOOL else tree
    return {name: _as_torch(value) for name, value in block.items()}


def _make_profiler(
    make: Callable[..., None], profiler: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    make(*args, **kwargs)
    given: dict[str, Any] = inspect.signature(make).bind(*args, **kwargs).arguments
    config: Any = given.get("config")
    if getattr(config, "tool", None) == TOOL and config.enable:
        profiler._impl = WorkerProfiler(given["rank"], config, given.get("save_file_prefix"))


class WorkerProfiler:
    """The profiler of one worker of verl. The worker's `DistProfiler` calls it."""

    def __init__(self, rank: int, config: Any, role: str | None) -> None:
        """Read verl's `ProfilerConfig` of a role.

        Raises:
            ConfigError: An option of the tool `torch` is wrong.
        """
        self._rank = rank
        self._role = role or "worker"
        self._config = _one_worker(config, self._role)
        self._opened: Capture | None = None
        self._timed: dict[Method, Method] = {}

    def start(self, **kwargs: object) -> None:
        """Open a capture of the step `profile_step`, unless a capture is open in this process already."""
        global _capture
        if _capture is not None or slot.session() is not None:
            return
        step = kwargs.get("profile_step", kwargs.get("global_step"))
        if step is None:  # if stepscope guessed the step, the traces could be in a wrong folder
            failures.warn("stepscope: %s is not recorded: start_profile got no profile_step", self._role)
            return
        try:
            opened = capture(int(str(step)), config=self._config, role=self._role, rank=self._rank)
            _capture = self._opened = opened.open()
        except ours() as error:
            failures.note("opening a capture for verl", error)

    def stop(self) -> None:
        """Close the capture that `start` opened."""
        global _capture
        opened, self._opened = self._opened, None
        if opened is not None:
            _capture = None
            opened.close()

    def step(self) -> None:
        """Advance the schedule over mini-batches."""
        advance()

    def annotate(self, message: str | None = None, **kwargs: Any) -> Callable[[Method], Method]:
        """Return a decorator that records a worker's method as a span.

        The stage is verl's `role` (`actor_update`), else `message`, else the method's name. If no worker
        opened a capture, the method is not wrapped, because the preset records it.
        """
        stage = kwargs.get("role") or message
        return lambda method: self._annotate(method, str(stage or method.__name__)) if _capture else method

    def _annotate(self, method: Method, stage: str) -> Method:
        if method not in self._timed:  # verl decorates the method again at each call
            try:
                timed = api.timed(method, role=self._role, stage=stage, attrs=None)
                self._timed[method] = cast(Method, timed)
            except TypeError as error:  # the callable cannot be wrapped
                failures.note(f"timing {stage}", error)
                self._timed[method] = method
        return self._timed[method]


def _one_worker(config: Any, role: str) -> ProfileConfig:
    """Return a configuration for this process from verl's `ProfilerConfig` of one role. The configuration
    selects every step, because verl selects the steps.
    """
    options = _plain((config.tool_config or {}).get("torch") or {})
    block = {"enable": True, "all_ranks": config.all_ranks, "ranks": list(config.ranks)}
    tree = {
        "global_profiler": {"tool": "torch", "save_path": config.save_path, "steps": [0]},
        "actor_rollout_ref": {"actor": {"profiler": {**block, "tool_config": {"torch": options}}}},
    }
    read = ProfileConfig.from_verl(tree)
    return read.replace(steps=["every:1"], roles={role: read.roles["actor"]})


def _plain(options: Any) -> dict[str, Any]:
    """Return the options of a tool (a dataclass of verl, a mapping or a `DictConfig`) as a dict."""
    if OmegaConf.is_config(options):
        options = OmegaConf.to_container(options, resolve=True)
    if not isinstance(options, Mapping):
        options = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        name: _plain(value) if isinstance(value, Mapping) or dataclasses.is_dataclass(value) else value
        for name, value in options.items()
    }
