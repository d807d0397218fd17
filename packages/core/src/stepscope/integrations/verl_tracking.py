"""`stepscope` among the backends of verl's `Tracking`: `trainer.logger='["console","stepscope"]'`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from stepscope.recording.after.metrics import MetricsLog
from stepscope.recording.capture import configure

if TYPE_CHECKING:
    from types import ModuleType

BACKEND = "stepscope"
"""Name in `trainer.logger`."""


class StepscopeLogger:
    """A backend that keeps verl's numbers of each captured step beside the step."""

    def __init__(self) -> None:
        """Log into the folder of the run that is configured."""
        self._metrics = MetricsLog(configure.current().save_path)

    def log(self, data: Mapping[str, object], step: int) -> None:
        """Keep the numbers of a step. Called by `Tracking.log`."""
        self._metrics.log(step, data)


def extend(tracking: ModuleType) -> None:
    """Add the backend to `Tracking` in verl's module, where no function registers one."""
    supported: list[str] = tracking.Tracking.supported_backend
    if BACKEND not in supported:
        supported.append(BACKEND)
        wrapt.wrap_function_wrapper(tracking, "Tracking.__init__", _make_backends)


def _make_backends(
    make: Callable[..., None], tracking: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Make the backends that verl knows, and then this one if it is among the names."""
    make(*args, **kwargs)
    names: Any = inspect.signature(make).bind(*args, **kwargs).arguments.get("default_backend", ())
    if BACKEND in ([names] if isinstance(names, str) else names):
        tracking.logger[BACKEND] = StepscopeLogger()
