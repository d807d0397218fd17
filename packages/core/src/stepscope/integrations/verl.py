"""stepscope inside verl: a backend of its `Tracking`, and a tool of its `DistProfiler`.

From 0.9 on, verl loads this module wherever it is imported: it is an entry point of the group `verl.plugins`.
In older versions VERL_USE_EXTERNAL_MODULES names it. The preset `verl` loads it too. Each part waits until
verl imports what it belongs to, so this imports nothing of verl.

Where verl's own configuration selects stepscope, its trainer publishes that configuration for the whole Ray
job, in the key-value store of Ray's control service, which all nodes reach. A process of the job that imports
verl later, on whatever node, finds it here, before it imports what is instrumented.
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

from stepscope._recording import output
from stepscope._recording.capture import configure
from stepscope._recording.process import failures, identity, run
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
"""{module of verl: module of stepscope whose `extend` is called with it}."""
_NAMESPACE = "stepscope"


def publish(config: ProfileConfig) -> None:
    """Make `config` available to the processes that this job starts from now on. Does nothing without Ray."""
    key = _key()
    if key is not None:
        from ray.experimental import internal_kv

        value = msgspec.json.encode(config.to_settings())
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def published() -> ProfileConfig | None:
    """Return the configuration that a process of this job published, or None."""
    key = _key()
    if key is None:
        return None
    from ray.experimental import internal_kv

    value: Any = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return None if value is None else ProfileConfig.from_mapping(msgspec.json.decode(value))


def _key() -> bytes | None:
    """Return the key of this job; None if this process is not connected to Ray."""
    ray = identity.connected()
    if ray is None:
        return None
    return f"configuration of {ray.get_runtime_context().get_job_id()}".encode()


def _extend(module: ModuleType) -> None:
    try:
        import_module(_PLACES[module.__name__]).extend(module)
    except ours() as error:  # the import is the user's, and succeeds
        failures.note(f"stepscope in {module.__name__}", error)


def _join_the_job() -> None:
    """Use the configuration that the trainer of this Ray job has published, if there is one."""
    try:
        config = None if switch.DISABLED else published()
        if config is not None:
            configure.start_up(config)
    except ours() as error:  # likewise
        failures.note("taking the configuration of verl's trainer", error)


for _name in _PLACES:
    wrapt.register_post_import_hook(_extend, _name)
_join_the_job()


class MetricsLog:
    """The log of one training loop. Several calls for one step add to one file."""

    def __init__(self, save_path: str | os.PathLike[str]) -> None:
        """Make a log of the run in the folder `save_path`."""
        self._layout = RunLayout(save_path)
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Keep the numbers among `values` if the step has a folder. Never raise, and write on another thread.

        Texts, tensors with several elements, NaN and infinities are left out.
        """
        if switch.DISABLED:
            return
        try:
            earlier = self._values if step == self._step else {}
            self._step, self._values = step, {**earlier, **_numbers(values)}
            metrics = StepMetrics(run_id=run.run_id(), step=step, values=self._values)
            # After the exports of the capture, which make the folder.
            output.exporter().then(partial(self._write, metrics), deferred=False)
        except ours() as error:
            failures.note("keeping the trainer's numbers", error)

    def _write(self, metrics: StepMetrics) -> None:
        layout = self._layout.step(metrics.step)
        if not layout.root.is_dir():
            return  # a step that is not captured
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
        except ours(TypeError, ValueError, OverflowError, RuntimeError):  # no number
            continue
    return numbers


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
