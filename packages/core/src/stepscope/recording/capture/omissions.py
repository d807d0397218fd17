"""What a capture lacks and its user should hear of: workers it was not given, roles that nobody has."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from stepscope.config import ProfileConfig, RoleConfig
from stepscope.files.manifest.records import Manifest, OpenedBy
from stepscope.recording.process import failures

WORKERS, PROFILER = "workers", "profiler"
"""Their names in the manifest."""

_prepared = False
"""Whether `prepare` was given workers in this process. One writer: `workers_prepared`."""
_ASK_S = 1.0
"""The longest time for which closing a capture waits for Ray's list of actors."""
_asking: threading.Thread | None = None
"""The thread that asks Ray for it. One writer: `_actors_in_time`."""


def none_meant(group: object) -> bool:
    """Whether `workers={}` or `workers=[]` was written: there are to be none."""
    return isinstance(group, Mapping | Sequence) and not isinstance(group, str) and not group


def workers_prepared() -> None:
    """`prepare` was given workers here, so every capture is expected to be given them."""
    global _prepared
    _prepared = True


def were_prepared() -> bool:
    """Return whether `prepare` was given workers: a capture without them is a mistake then."""
    return _prepared


def missing_workers(*, engines: bool, opened_by: OpenedBy = "program") -> str | None:
    """Why a capture that was given no workers probably lacks them; None when nothing says so.

    Args:
        engines: It was given engines.
        opened_by: Who opened it, and can therefore name them.
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
        failures.note("asking Ray whether this is its driver", error)
        return None
    if opened_by == "instrument":
        return (
            "Ray runs here and the `instrument` entry with `step` names no workers: actors are not recorded. "
            "Fix: workers: {actor: path to them} in that entry"
        )
    return (
        "Ray runs here and capture() was given no workers: actors are not recorded. "
        "Fix: capture(step, workers={...}), or workers={} where there are none"
    )


def unmatched_roles(patterns: Mapping[str, RoleConfig], roles: Iterable[str], where: str) -> dict[str, str]:
    """Patterns of the configuration that match none of the roles: {pattern: what to say}. None of the
    defaults, which nobody wrote, and none that asks for spans alone.

    Args:
        where: Behind "roles", whose they are: `in this capture`.
    """
    from stepscope.config._words import closest

    if patterns == ProfileConfig().roles:
        return {}
    roles = sorted(set(roles))
    found = {}
    for pattern, settings in patterns.items():
        if pattern.strip("*") and settings.profiler and not any(fnmatchcase(role, pattern) for role in roles):
            near = closest(pattern, roles)
            found[pattern] = f"roles.{pattern} matched nothing; roles {where}: {', '.join(roles)}." + (
                f" Did you mean {near!r}?" if near else ""
            )
    return found


def no_profiler(config: ProfileConfig, manifest: Manifest) -> str | None:
    """Return why no profiler and no engine recorded anything, though some role is to be profiled."""
    items = [
        item for part in manifest.processes for item in part.expected if item.kind in ("trace", "engine")
    ]
    wanted = any(role.profiler for role in config.roles.values())
    if not wanted or any(item.state != "skipped" for item in items):
        return None
    reasons = dict.fromkeys(item.reason or item.state for item in items)
    return (
        f"no profiler ran: {'; '.join(reasons) or 'no stage began that it would record'}. "
        'For spans alone, write roles: {"*": {profiler: off}}'
    )


def left_out(taking_part: Collection[str]) -> dict[str, int]:
    """Return {class: number} of this Ray job's actors whose class `profile_step` decorates, where no actor of
    that class takes part.

    Args:
        taking_part: Ids of the actors that do.
    """
    from stepscope.recording.spans import wrapping

    if "ray" not in sys.modules or not wrapping.declared_classes:
        return {}
    names = _actors_in_time()
    present = {names[at] for at in taking_part if at in names}
    return Counter(name for name in names.values() if name in wrapping.declared_classes - present)


def _actors_in_time() -> dict[str, str]:
    """Return {id: class} of this job's actors; empty if Ray, which has no deadline, takes too long."""
    global _asking
    if _asking is not None and _asking.is_alive():
        return {}
    answers: list[dict[str, str]] = []
    try:
        _asking = threading.Thread(
            target=lambda: answers.append(_actors()), name="stepscope-actors", daemon=True
        )
        _asking.start()
        _asking.join(_ASK_S)
    except RuntimeError:  # no thread starts: the interpreter ends
        return {}
    if not answers:
        failures.warn_once(f"Ray did not answer within {_ASK_S:g} s: actors that were left out are not named")
        return {}
    return answers[0]


def _actors() -> dict[str, str]:
    import ray

    try:
        if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.SCRIPT_MODE:
            return {}
        from ray._private.state import state

        job = ray.get_runtime_context().get_job_id()
        table = state.actor_table(None, None, "ALIVE")
    except Exception as error:
        failures.note("asking Ray for the actors of this job", error)
        return {}
    return {at: about["ActorClassName"] for at, about in table.items() if about["JobID"] == job}
