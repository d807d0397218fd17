"""What a capture lacks and its user should hear of: workers it was not given, roles that nobody has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from stepscope.recording import guard

WORKERS = "workers"
"""The name under which the manifest has it."""

_prepared = False
"""Whether `prepare` was given workers in this process. One writer: `workers_prepared`."""
_warned: set[str] = set()
"""Reasons that were logged. One writer: `warn_once`."""


def none_meant(group: object) -> bool:
    """Whether `workers={}` or `workers=[]` was written: there are to be none."""
    return isinstance(group, Mapping | Sequence) and not isinstance(group, str) and not group


def workers_prepared() -> None:
    """`prepare` was given workers here, so every capture is expected to be given them."""
    global _prepared
    _prepared = True


def missing_workers(*, engines: bool) -> str | None:
    """Why a capture that was given no workers probably lacks them; None when nothing says so.

    Args:
        engines: It was given engines.
    """
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return None
        if _prepared:
            return (
                "prepare() was given workers and capture() none: actors are not recorded. "
                "Fix: capture(step, workers={...}), the same as for prepare()"
            )
        worker = getattr(ray.get_runtime_context(), "worker", None)
        if engines or worker is None or worker.mode != ray.SCRIPT_MODE:  # an actor, a task
            return None
    except Exception as error:
        guard.note("asking Ray whether this is its driver", error)
        return None
    return (
        "Ray runs here and capture() was given no workers: actors are not recorded. "
        "Fix: capture(step, workers={...}), or workers={} where there are none; in an `instrument` list, "
        "workers: {actor: path to them} beside `step`"
    )


def unmatched_roles(patterns: Iterable[str], roles: Iterable[str], where: str) -> dict[str, str]:
    """Patterns of the configuration that match none of the roles: {pattern: what to say}.

    Args:
        where: Behind "roles", whose they are: `in this capture`.
    """
    from stepscope.config._words import closest

    roles = sorted(set(roles))
    found = {}
    for pattern in patterns:
        if pattern.strip("*") and not any(fnmatchcase(role, pattern) for role in roles):
            near = closest(pattern, roles)
            found[pattern] = f"roles.{pattern} matched nothing; roles {where}: {', '.join(roles)}." + (
                f" Did you mean {near!r}?" if near else ""
            )
    return found


def warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        guard.warn("stepscope: %s", reason)
