"""Calls by which a training loop tells stepscope: a mini-batch is done; this trajectory is trained on;
write files now; call this when files are there.
"""

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
    """Walk the profiler's schedule (`torch.schedule`) at the end of a mini-batch. Does nothing without a
    capture.
    """
    session = slot.active
    if session is not None:
        session.advance()


@uncompiled
def consume(trajectory_id: str, /, *, begun: int | None = None, policy_version: int | None = None) -> None:
    """Record that this step trains on a trajectory (async RL): the report then knows how stale it is.

    Call it where the trainer takes the trajectory out of its queue, in a process that is captured. Inside
    `span(..., policy_version=)`, that version is the one under which the trajectory is consumed. Without a
    capture, and in code that torch.compile compiles, the call does nothing.

    Args:
        trajectory_id: As given to `trajectory`.
        begun: The step under which the trajectory began.
        policy_version: Version of the weights with which the trajectory began.
    """
    session = compiled.recording()
    if session is not None:
        session.consume(str(trajectory_id), begun, policy_version)


@uncompiled
def step_tokens(*, rollout: int | None = None, train: int | None = None) -> None:
    """Count tokens of this step: the report then has tokens per second, and so has the step's line.

    Call it inside the step. Calls add up, over processes too: each gives the tokens of its own share. Without
    a capture or the flight recorder, and in code that torch.compile compiles, it does nothing.

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
    """Write all pending files, deferred exports included. Call it where the process waits anyway.

    Blocks for up to `timeout_s`.

    Returns:
        Names of the files that are still unfinished after that time.
    """
    if switch.DISABLED:
        return []
    from stepscope._recording import output  # import time: loaded already where anything waits

    return output.exporter().drain(timeout_s)


def on_artifact(hook: ArtifactHook) -> ArtifactHook:
    """Call `hook(path, sidecar)` for each file that a capture leaves, once it is whole and in place.

    Use it as a function or as a decorator. Hooks get the files of this process' own profiler and of the
    engines that its captures name; the files of a worker go to hooks that are registered in the worker. Hooks
    run one after another on a separate thread, so training never waits for them. An exception is logged once
    and recorded in the manifest.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return registered(hook, "on_artifact", _pipeline().artifact_hooks)


def on_report(hook: ReportHook) -> ReportHook:
    """Call `hook(scalars)` with a step's figures after each capture that this process opened.

    `scalars.step` and `scalars.values`: seconds by name (`stage/<role>/<stage>_seconds`...), for instance for
    the run that the training logs to. They are computed in a process of their own once all files are there.
    Register it before the capture opens. Otherwise as `on_artifact`.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    return registered(hook, "on_report", _pipeline().report_hooks)


def _pipeline() -> ModuleType:
    from stepscope._recording.after import pipeline  # import time: it reads and writes files

    return pipeline


def redact(hook: RedactHook) -> RedactHook:
    """Call `hook(key, value)` for each attribute of a span before it is written, and write its result.

    Use it as a function or as a decorator, in each process whose spans are to be redacted; a later call
    replaces the hook. The text of an exception is passed as the attribute `error`. If the hook raises,
    `[redacted]` is written. It runs on the writing thread.

    Raises:
        ConfigError: `hook` is not callable, or is an `async def`, which would never be awaited.
    """
    _refuse_uncallable(hook, "redact")
    redaction.hook = hook
    return hook


def registered(hook: AnyHook, name: str, hooks: list[Any]) -> AnyHook:
    """Add the hook to the list that `name` stands for, once, and return it."""
    _refuse_uncallable(hook, name)
    if hook not in hooks:
        hooks.append(hook)
    return hook


def _refuse_uncallable(hook: object, name: str) -> None:
    if not callable(hook) or _is_async(hook):
        raise ConfigError(f"{name}(hook)", hook, "a function that is not async", "pass a plain function")


def _is_async(hook: object) -> bool:
    """Return whether calls of the hook, or of the function that it decorates, make coroutines."""
    while isinstance(hook, partial):
        hook = hook.func
    called: object = getattr(hook, "__func__", hook)
    if not isinstance(called, FunctionType):
        called = getattr(type(hook), "__call__", None)  # noqa: B004  # the method of an object
    return isinstance(called, FunctionType) and any(map(iscoroutinefunction, layers.path_of(called)))
