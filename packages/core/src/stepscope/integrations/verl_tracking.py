"""`stepscope` among the backends of verl's `Tracking`: `trainer.logger='["console","stepscope"]'`.

verl's annotations for rl-insight, which pass through the same module, become spans if they are enabled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import wrapt

from stepscope._recording.after.metrics import MetricsLog
from stepscope._recording.capture import configure
from stepscope._recording.spans import slot
from stepscope._recording.spans.api import span
from stepscope._recording.spans.scopes import current

if TYPE_CHECKING:
    from types import ModuleType

BACKEND = "stepscope"
"""Name in `trainer.logger`."""


ANNOTATED = {
    "actor_update": ("actor", "update_actor"),
    "actor_compute_log_prob": ("actor", "compute_log_prob"),
    "ref_compute_log_prob": ("ref", "compute_ref_log_prob"),
    "vllm_generate": ("rollout", "generate"),
    "sglang_generate": ("rollout", "generate"),
}
"""{name of an annotation: (role, stage) in the preset `verl`}. Other annotations keep their name and get the
role of the enclosing span."""
_REPLICA = re.compile(r"replica_(\d+)")


class StepscopeLogger:
    """A `Tracking` backend that writes verl's numbers of each captured step into the step's folder."""

    def __init__(self) -> None:
        """Log into the folder of the configured run."""
        self._metrics = MetricsLog(configure.current().save_path)

    def log(self, data: Mapping[str, object], step: int) -> None:
        """Keep the numbers of a step. Called by `Tracking.log`."""
        self._metrics.log(step, data)


def extend(tracking: ModuleType) -> None:
    """Add the backend to `Tracking` in verl's module, because verl has no function for that."""
    supported: list[str] = tracking.Tracking.supported_backend
    if BACKEND not in supported:
        supported.append(BACKEND)
        wrapt.wrap_function_wrapper(tracking, "Tracking.__init__", _make_backends)
    if hasattr(getattr(tracking, "RLInsightLogger", None), "trace_state"):  # from 0.9 on
        wrapt.wrap_function_wrapper(tracking, "RLInsightLogger.trace_state", _trace_state)


def _make_backends(
    make: Callable[..., None], tracking: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Make verl's own backends, then this one if its name is among the names."""
    make(*args, **kwargs)
    names: Any = inspect.signature(make).bind(*args, **kwargs).arguments.get("default_backend", ())
    if BACKEND in ([names] if isinstance(names, str) else names):
        tracking.logger[BACKEND] = StepscopeLogger()


def _trace_state(
    trace: Callable[..., AbstractContextManager[None]],
    logger: Any,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> AbstractContextManager[None]:
    """Return verl's annotation of a state, with a span around it if annotations are on and a capture
    records.
    """
    theirs = trace(*args, **kwargs)
    if slot.active is None or not logger.enabled():
        return theirs
    given = inspect.signature(trace).bind(*args, **kwargs).arguments
    name = str(given["state_name"])
    role, stage = ANNOTATED.get(name, (None, name))
    if _is_open(role, stage):
        return theirs
    lane = _REPLICA.fullmatch(str(given.get("state_lane_id")))
    attrs = {**given.get("labels", {}), **({"replica": int(lane[1])} if lane else {})}
    return _within(span(stage, role, attrs=attrs), theirs)


def _is_open(role: str | None, stage: str) -> bool:
    """Return whether the preset has already opened a span of that work here, for the same function."""
    scope: Any = current.get()
    while scope is not None:
        if (getattr(scope, "role", None), getattr(scope, "stage", None)) == (role, stage):
            return True
        scope = scope.parent
    return False


@contextmanager
def _within(own: AbstractContextManager[Any], theirs: AbstractContextManager[None]) -> Iterator[None]:
    with own, theirs:
        yield
