"""The public functions that record spans: `span`, `trajectory`, `turn`, and the decorator `profile_step`.

Calls are recorded during a capture, and by the flight recorder. Otherwise a call only reads one variable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import TypeVar, cast, overload

from stepscope._recording.spans import layers, slot, wrapping
from stepscope._recording.spans.scopes import OFF, Scope, UncapturedTrajectory, UncapturedTurn
from stepscope._recording.spans.wrapping import Attrs
from stepscope.errors import ConfigError
from stepscope.files import switch
from stepscope.files.values import AttrValue, attr_values, whole


def trajectory(
    trajectory_id: str,
    /,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """Record one agent rollout as a span of stage `trajectory`. All spans inside have the trajectory's
    id.

    Use the result with `with` or `async with`:

        with trajectory("problem17-3"), turn(0):
            reply = await generate(prompt)

    If neither a capture nor the flight recorder records, only the id is stored, so that spans of a capture
    that opens meanwhile have the id.

    Args:
        trajectory_id: An id that is unique within the run.
        step: The step that consumes the trajectory, if it is not the running step (async RL).
        policy_version: Version of the weights when the trajectory begins.
        attrs: Further attributes of the span, as in `span`.
    """
    session = slot.active
    if session is None:
        scope = UncapturedTrajectory()
        scope.step = None if step is None else whole(step)
        scope.policy_version = None if policy_version is None else whole(policy_version)
        scope.trajectory = str(trajectory_id)
        scope.entered, scope.turns = False, None
        return scope
    return session.log.new(
        "trajectory",
        "agent_loop",
        attr_values(attrs) if attrs else None,
        step=None if step is None else whole(step),
        policy_version=None if policy_version is None else whole(policy_version),
        trajectory=str(trajectory_id),
    )


def turn(index: int, *, attrs: Mapping[str, AttrValue] | None = None) -> Scope:
    """Record one round of model and tool calls in a trajectory as a span of stage `turn`.

    Use the result with `with` or `async with`, inside `trajectory`.

    Args:
        index: Number of the turn within its trajectory, from 0.
        attrs: Further attributes of the span, as in `span`.
    """
    session = slot.active
    if session is None:
        scope = UncapturedTurn()
        scope.turn = index if type(index) is int else whole(index)
        scope.policy_version, scope.entered = None, False
        return scope
    return session.log.new(
        "turn",
        "agent_loop",
        attr_values(attrs) if attrs else None,
        turn=index if type(index) is int else whole(index),
    )


def span(
    stage: str,
    role: str | None = None,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    attrs: Mapping[str, AttrValue] | None = None,
) -> Scope:
    """Record a block of code as a span.

    Use the result with `with` or `async with`. Its method `set(key=value)` adds attributes:

        with span("score", role="reward") as score:
            score.set(samples=len(batch))

    Args:
        stage: Name of the work.
        role: Role that does the work. By default the role of the enclosing span, else of the process.
        step: The step that the work belongs to, if it is not the running step.
        policy_version: Version of the weights in use.
        attrs: {name: value}. Values other than str, int, float, bool and None are stored as text.
    """
    session = slot.active
    if session is None:
        return OFF
    return session.log.new(
        stage,
        role,
        attr_values(attrs) if attrs else None,
        step=None if step is None else whole(step),
        policy_version=None if policy_version is None else whole(policy_version),
    )


F = TypeVar("F")  # no bound: for type checkers, @ray.method does not return a Callable


# The first overload that fits counts, so a text is a role.
@overload
def profile_step(
    role: str | None = None, *, stage: str | None = None, attrs: Attrs | None = None
) -> Callable[[F], F]: ...
@overload
def profile_step(role: F, *, stage: str | None = None, attrs: Attrs | None = None) -> F: ...
def profile_step(role: object = None, *, stage: str | None = None, attrs: Attrs | None = None) -> object:
    """Decorate a function, so that each of its calls is recorded as a span.

    `@profile_step("actor")`, `@profile_step(role="actor", stage="update")`, or `@profile_step` alone.

    The result is a function of the same kind (sync, `async def`, generator, async generator) with the same
    signature and metadata. The decorator works on methods, and above or below @classmethod and @staticmethod.
    Put it below decorators that do not return a function (@ray.remote, @property), and above @torch.compile,
    because calls within a compiled graph are not recorded. A generator has a span for each resumption. If a
    plain function returns a coroutine, a generator or an asyncio future, the span lasts until that object
    ends; other awaitables are not followed. Another decorator below this one may inspect the frame of its
    caller, or hide an `async def`. Then the function below that decorator is recorded.

    Args:
        role: Role that does the work: `actor`, `rollout`, `env`... By default the role of the enclosing span,
            else of the process (its name in the capture's `workers`, or `worker`).
        stage: Name of the work; by default the function's name.
        attrs: Attributes of each span: a mapping, or a function of the call's arguments that returns a
            mapping or None. The function is called only during a capture (for a generator, at each
            resumption). Its exceptions are logged and not raised.

    Raises:
        ConfigError: `role`, `stage` or `attrs` has another type.
        TypeError: The argument is not a Python function, or inspects the frame of its caller. The message
            states the fix.

    With STEPSCOPE_DISABLE=1, functions are returned unchanged.
    """
    is_bare = callable(role) or isinstance(role, (classmethod, staticmethod, property))
    if switch.DISABLED:
        return role if is_bare else lambda fn: fn
    named = None if is_bare else role
    check(named, stage, attrs, needs_role=False)
    if attrs is not None and not callable(attrs):
        attrs = dict(attrs)
    decorate = partial(timed, role=cast("str | None", named), stage=stage, attrs=attrs)
    return decorate(role) if is_bare else decorate


def timed(target: object, *, role: str | None, stage: str | None, attrs: Attrs | None) -> object:
    """Return a wrapper of `target`. A classmethod or staticmethod stays one.

    Raises:
        TypeError: `target` is not a Python function, or inspects the frame of its caller.
    """
    if isinstance(target, (classmethod, staticmethod)):
        inner = timed(target.__func__, role=role, stage=stage, attrs=attrs)
        return type(target)(cast(FunctionType, inner))
    return layers.placed(function(target), partial(wrapping.wrap, role=role, stage=stage, attrs=attrs))


def function(target: object) -> FunctionType:
    """Return `target`. Raise `TypeError` with the fix if `target` is not a Python function."""
    if not inspect.isfunction(target) or target.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:
        raise TypeError(_refusal(target))
    return target


def check(role: object, stage: object, attrs: object, *, needs_role: bool = True) -> None:
    """Raise `ConfigError` for wrong arguments of `profile_step` or `instrument`. `instrument` needs a
    role.
    """
    if not _is_text(role) and (needs_role or role is not None):
        fix = 'say who does the work: role="actor"'
        raise ConfigError("profile_step(role)", role, "text that is not empty", fix)
    if stage is not None and not _is_text(stage):
        fix = "leave it out to take the function's name"
        raise ConfigError("profile_step(stage)", stage, "text that is not empty, or None", fix)
    if attrs is not None and not callable(attrs) and not isinstance(attrs, Mapping):
        allowed = "a mapping, or a function of the call's arguments that returns one"
        fix = 'attrs={"size": 7} or attrs=lambda self, batch: {"size": len(batch)}'
        raise ConfigError("profile_step(attrs)", attrs, allowed, fix)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _refusal(target: object) -> str:
    if isinstance(target, type):
        fix = f"decorate the methods of {target.__name__} that are to be timed"
    elif isinstance(target, partial):
        fix = "decorate the function inside: functools.partial(profile_step(role=...)(fn), ...)"
    elif isinstance(target, property):
        fix = "put @property above @profile_step"
    elif inspect.isfunction(target):
        fix = "write the coroutine as `async def` instead of with types.coroutine"
    elif inspect.ismethod(target):
        fix = f"decorate the function in the class: {target.__func__.__qualname__}"
    else:
        fix = "put @profile_step below what made it, directly on the `def`, or on a `def` that calls it"
    return f"profile_step times Python functions, not {target!r} (a {type(target).__name__}). Fix: {fix}"
