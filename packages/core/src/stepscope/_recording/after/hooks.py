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
    """Walk the profiler's schedule (`torch.schedule`) at the end of a mini-batch. Without a capture,
    nothing.
    """
    session = slot.active
    if session is not None:
        session.advance()


@uncompiled
def consume(trajectory_id: str, /, *, begun: int | None = None, policy_version: int | None = None) -> None:
    """Record that this step trains on a trajectory (async RL): the report then knows how stale it is.

    Call it where the trainer takes the trajectory out of its queue, in a process that is captured. Inside
    `span(..., policy_version=)`, that is the version it is consumed under. Without a capture, and in code
    that torch.compile compiles, it does nothing.

    Args:
        trajectory_id: As given to `trajectory`.
        begun: The step under which it was begun.
        policy_version: Of the weights it was begun with.
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
        Names of files that are unfinished then.
    """
    if switch.DISABLED:
        return []
    from stepscope._recording.output import exporter  # import time: loaded already where anything waits

    return exporter.exporter().drain(timeout_s)


def on_artifact(hook: ArtifactHook) -> ArtifactHook:
    """Call `hook(path, sidecar)` for each file that a capture leaves, once it is whole and in place.

    A function, or a decorator of one. Of this process' own profiler, and of the engines that its captures
    name; a worker's files are told to hooks that are registered in the worker. Hooks run one after another on
    a thread of their own: whatever they do, training goes on. An exception is logged once and stands in the
    manifest.

    Raises:
        ConfigError: it cannot be called, or is an `async def`, which nobody would await.
    """
    return registered(hook, "on_artifact", _pipeline().artifact_hooks)


def on_report(hook: ReportHook) -> ReportHook:
    """Call `hook(scalars)` with a step's figures after each capture that this process opened.

    `scalars.step` and `scalars.values`: seconds by name (`stage/<role>/<stage>_seconds`...), for instance for
    the run that the training logs to. They are computed in a process of their own once all files are there.
    Register it before the capture opens. Otherwise as `on_artifact`.

    Raises:
        ConfigError: it cannot be called, or is an `async def`, which nobody would await.
    """
    return registered(hook, "on_report", _pipeline().report_hooks)


def _pipeline() -> ModuleType:
    from stepscope._recording.after import pipeline  # import time: it reads and writes files

    return pipeline


def redact(hook: RedactHook) -> RedactHook:
    """Call `hook(key, value)` for each attribute of a span before it is written, and write its result.

    A function, or a decorator of one; the last one counts, in the process that registers it. An exception's
    text is the attribute `error`. Where it raises, `[redacted]` is written. It runs on the writing thread.

    Raises:
        ConfigError: it cannot be called, or is an `async def`, which nobody would await.
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
    """Return whether calls of the hook make coroutines, below decorators too."""
    while isinstance(hook, partial):
        hook = hook.func
    called: object = getattr(hook, "__func__", hook)
    if not isinstance(called, FunctionType):
        called = getattr(type(hook), "__call__", None)  # noqa: B004  # the method of an object
    return isinstance(called, FunctionType) and any(map(iscoroutinefunction, layers.path_of(called)))
