"""`stepscope` among the tools of verl's `DistProfiler`: `global_profiler.tool=stepscope`.

verl decides which ranks and steps start a profiler. The options are those of its tool `torch`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from stepscope.integrations.verl_dist_profiler import DistProfiler

if TYPE_CHECKING:
    from types import ModuleType

TOOL = "stepscope"
"""Name in `global_profiler.tool`."""
AS_TORCH = {"tool": "torch", "finish_hook_cmd": None}
"""Values that replace those of a block that names the tool. verl runs the finish command itself."""

Method = Callable[..., Any]


class WorkerProfiler:
    """The profiler of one verl worker, behind its `DistProfiler`."""

    def __init__(self, rank: int, config: Any, role: str | None) -> None:
        """Read verl's `ProfilerConfig` of a role.

        Raises:
            ConfigError: An option of the tool `torch` is wrong.
        """
        options = (config.tool_config or {}).get("torch")
        config = dataclasses.replace(config, **AS_TORCH)
        self._profiler = DistProfiler(rank, config=config, tool_config=options, save_file_prefix=role)
        self.role = self._profiler.role
        self._annotated: dict[Method, Method] = {}

    def start(self, **kwargs: object) -> None:
        """Open a capture of the step `profile_step`, unless the driver's capture records this process."""
        self._profiler.start(**kwargs)

    def stop(self) -> None:
        """Close the capture that `start` opened."""
        self._profiler.stop()

    def step(self) -> None:
        """Walk the schedule over mini-batches."""
        self._profiler.step()

    def annotate(self, **kwargs: Any) -> Callable[[Method], Method]:
        """Return a decorator of a worker's method. It records nothing in the driver's capture, which does."""
        return lambda method: self._annotate(method, **kwargs) if self._profiler.opened else method

    def _annotate(self, method: Method, **kwargs: Any) -> Method:
        if method not in self._annotated:  # verl decorates at each call
            self._annotated[method] = DistProfiler.annotate(**kwargs)(method)
        return self._annotated[method]


def extend(profile: ModuleType) -> None:
    """Add the tool to `DistProfiler` in verl's module. No function registers one."""
    wrapt.wrap_function_wrapper(profile, "DistProfiler.__init__", _make_profiler)


def _make_profiler(
    make: Callable[..., None], profiler: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    make(*args, **kwargs)
    given: dict[str, Any] = inspect.signature(make).bind(*args, **kwargs).arguments
    config: Any = given.get("config")
    if getattr(config, "tool", None) == TOOL and config.enable:
        tool = WorkerProfiler(given["rank"], config, given.get("save_file_prefix"))
        profiler._impl = tool  # where verl looks for the profiler of a tool
        profiler.role = tool.role  # where `DistProfiler.annotate` looks for the role of a worker
