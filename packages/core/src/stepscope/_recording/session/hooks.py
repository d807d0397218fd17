"""Public functions that a training loop calls during a step, and the registration of hooks."""

from __future__ import annotations

from functools import partial
from inspect import iscoroutinefunction
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope._recording.spans import compiled, layers, redaction, slot
from stepscope._recording.spans.compiled import uncompiled
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope.files.values import whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from stepscope.files.scalars import StepScalars
    from stepscope.files.sidecar import Sidecar
    from stepscope.files.values import AttrValue

    ArtifactHook = TypeVar("ArtifactHook", bound=Callable[[Path, Sidecar], object])
    RedactHook = TypeVar("RedactHook", bound=Callable[[str, AttrValue], AttrValue])
    ReportHook = TypeVar("ReportHook", bound=Callable[[StepScalars], object])
    AnyHook = TypeVar("AnyHook", bound=Callable[..., object])


def advance() -> None:
    """Advance the profiler's schedule (`torch.schedule`) by one mini-batch. Call this at the end of each
    mini-batch.

    Without a capture, or without a schedule, the call does nothing.
    """
    session = slot.active
    if session is not None:
        session.advance()


@uncompiled
def consume(trajectory_id: str, /, *, begun: int | None = None, policy_version: int | None = None) -> None:
    """Record that this step trains on a trajectory (async RL), so that the report can compute its staleness.

    Call this where the trainer takes the trajectory out of its queue, in a captured process. The trajectory
    is consumed under the `policy_version` of the enclosing `span(..., policy_version=)`. Without a capture
    or the flight recorder, and in code compiled by torch.compile, the call does nothing.

    Args:
        trajectory_id: The id that was given to `trajectory`.
        begun: The step in which the trajectory began.
        policy_version: Version of the weights with which the trajectory began.
    """
    session = compiled.recording()
    if session is not None:
        session.consume(str(trajectory_id), begun, policy_version)


@uncompiled
def step_tokens(*, rollout: int | None = None, train: int | None = None) -> None:
    """Count tokens of this step, so that the report and the step's line have tokens per second.

    Call this within the step. Calls add up, also over processes, so each process counts only its own tokens.
    Without a capture or the flight recorder, and in code compiled by torch.compile, the call does nothing.

    Args:
        rollout: Tokens that were generated.
        train: Tokens that were trained on.
    """
    session = compiled.recording()
    if session is None:
        return
    given = {"rollout": whole(rollout), "train": whole(train)}
    counts = {name: number for name, number in given.items() if number is not None}
    session.count_tokens(counts)
    if slot.recorder is not None and slot.recorder is not session:
        slot.recorder.note_tokens(counts)


def flush(timeout_s: float = 60.0) -> list[str]:
    """Write all pending files, also deferred exports. Call this while the process is idle.

    The call blocks for up to `timeout_s` seconds.

    Returns:
        Names of the files that are still not written; empty if all are.
    """
    if switch.DISABLED:
        return []
    from stepscope._recording.process import exports  # imported here: not needed without files

    return exports.exporter().drain(timeout_s)


def on_artifact(hook: ArtifactHook) -> ArtifactHook:
    """Call `hook(path, sidecar)` for each file of a capture, once the file is complete and has its final
    name.

    Use this as a function or as a decorator. `path` is a `pathlib.Path`, and `sidecar` a
    `stepscope.files.sidecar.Sidecar`, which has the file's kind, role, rank and step:

        @on_artifact
        def upload(path, sidecar):
            bucket.put(path, labels={"step": sidecar.step, "kind": sidecar.artifact.kind})

    Hooks get the files of this process' profiler, and of the engines that were given to its captures. A file
    of a worker goes to hooks that are registered in the worker. Hooks run one after another on a separate
    thread, so training does not wait for them. An exception is logged once and recorded in the manifest.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return registered(hook, "on_artifact", _pipeline().artifact_hooks)


def on_report(hook: ReportHook) -> ReportHook:
    """Call `hook(scalars)` with a step's figures after each capture that this process opened.

    `scalars` is a `stepscope.files.scalars.StepScalars`: `scalars.step` is the number of the step, and
    `scalars.values` is {name: value}, with names such as `stage/<role>/<stage>_seconds`. A separate process
    computes the figures once all files are written. Register the hook before the capture opens. The hook runs
    on the same thread as `on_artifact` hooks.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return registered(hook, "on_report", _pipeline().report_hooks)


def _pipeline() -> ModuleType:
    from stepscope._recording.session import pipeline  # imported here, because the module imports much

    return pipeline


def redact(hook: RedactHook) -> RedactHook:
    """Call `hook(key, value)` for each attribute of a span before it is written, and write its result.

    Use this as a function or as a decorator, in each process whose spans should be redacted. A later call
    replaces the hook: `redact(lambda key, value: "***" if key == "prompt" else value)`. The hook runs on the
    writing thread, and gets the text of an exception as the attribute `error`. If the hook raises,
    `[redacted]` is written.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    _refuse_uncallable(hook, "redact")
    redaction.hook = hook
    return hook


def registered(hook: AnyHook, name: str, hooks: list[Any]) -> AnyHook:
    """Add `hook` to `hooks`, unless `hooks` has it already. Return `hook`.

    Args:
        name: Name of the public function, for errors.
    """
    _refuse_uncallable(hook, name)
    if hook not in hooks:
        hooks.append(hook)
    return hook


def _refuse_uncallable(hook: object, name: str) -> None:
    if not callable(hook) or _is_async(hook):
        raise ConfigError(f"{name}(hook)", hook, "a function that is not async", "pass a plain function")


def _is_async(hook: object) -> bool:
    """Return whether the hook, or a function that it wraps, is an `async def`."""
    while isinstance(hook, partial):
        hook = hook.func
    called: object = getattr(hook, "__func__", hook)
    if not isinstance(called, FunctionType):
        called = getattr(type(hook), "__call__", None)  # noqa: B004  # the method of an object
    return isinstance(called, FunctionType) and any(map(iscoroutinefunction, layers.path_of(called)))
