"""stepscope inside verl: a backend of its `Tracking`, and a tool of its `DistProfiler`.

Since 0.9, importing verl imports this module too, because it is an entry point of the group `verl.plugins`.
For older versions, set VERL_USE_EXTERNAL_MODULES to this module. The preset `verl` imports this module too.
The module does not import verl: each part is added when verl imports the module that the part extends.

If verl's configuration selects stepscope, the trainer publishes stepscope's configuration for the Ray job in
Ray's key-value store, which all nodes can reach. A process of the job that imports verl later takes the
configuration from there, before it imports the modules to instrument.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import msgspec
import wrapt

from stepscope._recording.capture import configure
from stepscope._recording.process import exports, failures, identity
from stepscope._recording.spans import slot
from stepscope._recording.spans.api import span
from stepscope._recording.spans.scopes import current
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.scalars import StepMetrics, write_metrics

if TYPE_CHECKING:
    from types import ModuleType


_PLACES = {
    "verl.utils.tracking": "stepscope.integrations.verl",
    "verl.utils.profiler.profile": "stepscope.integrations.verl_tool",
    "verl.trainer.ppo.ray_trainer": "stepscope.integrations.verl_tool",
    "verl.trainer.ppo.v1.trainer_base": "stepscope.integrations.verl_tool",
}
"""{module of verl: module of stepscope whose `extend` is called with the module of verl}."""
_NAMESPACE = "stepscope"


def publish(config: ProfileConfig) -> None:
    """Publish `config` for processes that this Ray job starts from now on. Do nothing without Ray."""
    key = _key()
    if key is not None:
        from ray.experimental import internal_kv

        value = msgspec.json.encode(config.to_settings())
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def published() -> ProfileConfig | None:
    """Return the configuration that was published for this Ray job, or None."""
    key = _key()
    if key is None:
        return None
    from ray.experimental import internal_kv

    value: Any = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return None if value is None else ProfileConfig.from_mapping(msgspec.json.decode(value))


def _key() -> bytes | None:
    """Return the key of this Ray job, or None if this process is not connected to Ray."""
    ray = identity.connected()
    if ray is None:
        return None
    return f"configuration of {ray.get_runtime_context().get_job_id()}".encode()


def _extend(module: ModuleType) -> None:
    try:
        import_module(_PLACES[module.__name__]).extend(module)
    except ours() as error:  # the user's import must succeed
        failures.note(f"stepscope in {module.__name__}", error)


def _join_the_job() -> None:
    """Use the configuration that was published for this Ray job, if there is one."""
    try:
        config = None if switch.DISABLED else published()
        if config is not None:
            configure.start_up(config)
    except ours() as error:  # the user's import must succeed
        failures.note("taking the configuration of verl's trainer", error)


for _name in _PLACES:
    wrapt.register_post_import_hook(_extend, _name)
_join_the_job()


class MetricsLog:
    """Writer of the numbers that one training loop logs. Several calls for a step add to one file."""

    def __init__(self, save_path: str | os.PathLike[str]) -> None:
        """Write into the step folders below `save_path`."""
        self._layout = RunLayout(save_path)
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Write the numbers in `values` on another thread, if the step has a folder. Never raise.

        Other values are left out: text, tensors with several elements, NaN and infinities.
        """
        if switch.DISABLED:
            return
        try:
            earlier = self._values if step == self._step else {}
            self._step, self._values = step, {**earlier, **_numbers(values)}
            metrics = StepMetrics(run_id=identity.run_id(), step=step, values=self._values)
            # Queued after the exports of the capture, which create the folder.
            exports.exporter().then(partial(self._write, metrics), deferred=False)
        except ours() as error:
            failures.note("keeping the trainer's numbers", error)

    def _write(self, metrics: StepMetrics) -> None:
        layout = self._layout.step(metrics.step)
        if not layout.root.is_dir():
            return  # the step was not captured
        try:
            write_metrics(layout, metrics)
        except ours(OSError) as error:
            failures.note("writing the trainer's numbers", error)


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, str):
            continue
        try:
            number = float(cast(SupportsFloat, value))
            if math.isfinite(number):
                numbers[str(name)] = number
        except ours(TypeError, ValueError, OverflowError, RuntimeError):  # not a number
            continue
    return numbers


BACKEND = "stepscope"
"""Name of the backend in `trainer.logger`."""


ANNOTATED = {
    "actor_update": ("actor", "update_actor"),
    "actor_compute_log_prob": ("actor", "compute_log_prob"),
    "ref_compute_log_prob": ("ref", "compute_ref_log_prob"),
    "vllm_generate": ("rollout", "generate"),
    "sglang_generate": ("rollout", "generate"),
}
"""{name of verl's annotation: (role, stage) of the same work in the preset `verl`}. Spans of other
annotations have the annotation's name and the role of the enclosing span."""
_REPLICA = re.compile(r"replica_(\d+)")


class StepscopeLogger:
    """A `Tracking` backend that writes verl's numbers of each captured step into the step's folder."""

    def __init__(self) -> None:
        """Write into the folder of the configured run."""
        self._metrics = MetricsLog(configure.current().save_path)

    def log(self, data: Mapping[str, object], step: int) -> None:
        """Write the numbers of a step. `Tracking.log` calls this."""
        self._metrics.log(step, data)


def extend(tracking: ModuleType) -> None:
    """Add the backend to `Tracking` in verl's module. verl has no function for this."""
    supported: list[str] = tracking.Tracking.supported_backend
    if BACKEND not in supported:
        supported.append(BACKEND)
        wrapt.wrap_function_wrapper(tracking, "Tracking.__init__", _make_backends)
    if hasattr(getattr(tracking, "RLInsightLogger", None), "trace_state"):  # since verl 0.9
        wrapt.wrap_function_wrapper(tracking, "RLInsightLogger.trace_state", _trace_state)


def _make_backends(
    make: Callable[..., None], tracking: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Call the original `__init__`, then add this backend if its name is in `default_backend`."""
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
    """Return verl's annotation. If annotations are on and a capture is open, the annotation runs in a span,
    which the preset may have opened already.
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
    """Return whether a span of the same role and stage is open in this task, because the preset has opened
    it.
    """
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
