"""Warnings about omissions in a capture: workers that were not passed, and roles that no process has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from stepscope._recording.process import failures
from stepscope._recording.process.identity import is_first
from stepscope._recording.process.manifest_part import ManifestPart
from stepscope._recording.session.selection import is_installed
from stepscope.config import ProfileConfig, RoleConfig
from stepscope.config._fields import closest
from stepscope.config._profile import DEFAULT_ROLES
from stepscope.errors import ours
from stepscope.files.manifest import OpenedBy, ProcessPart

WORKERS, PROFILER = "workers", "profiler"
"""Names of two omissions in the manifest."""

_prepared = False
"""True if `prepare` was called with workers in this process. One writer: `workers_prepared`."""


def none_meant(group: object) -> bool:
    """Return whether `group` is empty, as in `workers={}`, which states that there are no workers."""
    return isinstance(group, Mapping | Sequence) and not isinstance(group, str) and not group


def workers_prepared() -> None:
    """Record that `prepare` was called with workers in this process, so that captures without workers are
    reported.
    """
    global _prepared
    _prepared = True


def enter_missing_workers(manifest_part: ManifestPart, *, engines: bool, opened_by: OpenedBy) -> None:
    """Record a warning if this capture was given no workers but the run probably has workers."""
    reason = _missing_workers(engines=engines, opened_by=opened_by)
    if reason is not None:
        failures.warn_once(reason)
        enter = manifest_part.lack if _prepared else manifest_part.skip
        enter(WORKERS, reason, kind="selection")


def _missing_workers(*, engines: bool, opened_by: OpenedBy) -> str | None:
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
        # A process that is not the driver runs an actor or a task, which need not have workers.
        if engines or worker is None or worker.mode != ray.SCRIPT_MODE:
            return None
    except ours() as error:
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


def enter_unmatched(
    manifest_part: ManifestPart, config: ProfileConfig, parts: Sequence[ProcessPart], *, engines: bool
) -> None:
    """Record roles of the configuration that match no process, and the reason if no profiler ran.

    Args:
        parts: The parts of all processes of the capture.
    """
    roles = {role for part in parts for role in (part.process.role, *part.roles)}
    known = roles | {"rollout"} if engines else roles
    unmatched = False
    for pattern, reason in unmatched_roles(config.roles, known, "in this capture").items():
        failures.warn_once(reason, about=f"roles.{pattern}")
        if config.roles[pattern].profiler:
            unmatched = True
            manifest_part.lack(f"roles.{pattern}", reason, kind="selection")
    # If `ranks` leaves out a rank, the profiler may run in other ranks, whose parts may not be on this host.
    by_rank = any(_is_left_out(config, part) for part in parts)
    why_none = None if unmatched or by_rank else no_profiler(config, parts)
    if why_none is not None:
        failures.warn_once(why_none)
        enter = manifest_part.skip if config.roles == DEFAULT_ROLES else manifest_part.lack
        enter(PROFILER, why_none, kind="selection")


def tell_missed(parts: Iterable[ProcessPart]) -> None:
    """Log the functions that a preset lists but a process lacks, once for each function.

    Functions that this process has already logged are left out. Ranks other than 0 log nothing.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    patch = sys.modules.get("stepscope._recording.instrument.patch")
    logged = patch.missed if patch is not None and is_first() else {}
    for place, reason in (item for part in parts for item in part.missed.items()):
        if place not in logged:
            failures.warn_once(f"disabled {place}; training continues: {reason}")


def unmatched_roles(patterns: Mapping[str, RoleConfig], roles: Iterable[str], where: str) -> dict[str, str]:
    """Return {pattern: message} of the patterns that match none of the roles.

    Default patterns are left out. A pattern with `profiler: off` is returned only if it is similar to a role,
    and so may be misspelt. Otherwise the run lacks nothing.

    Args:
        where: Words that follow "roles" in the message, such as `in this capture`.
    """
    if patterns == DEFAULT_ROLES:
        return {}
    roles = sorted(set(roles))
    unmatched = {}
    for pattern, settings in patterns.items():
        if not pattern.strip("*") or any(fnmatchcase(role, pattern) for role in roles):
            continue
        near = closest(pattern, roles)
        if settings.profiler or near:
            unmatched[pattern] = f"roles.{pattern} matched nothing; roles {where}: {', '.join(roles)}." + (
                f" Did you mean {near!r}?" if near else ""
            )
    return unmatched


def no_profiler(config: ProfileConfig, parts: Iterable[ProcessPart]) -> str | None:
    """Return the reason if a role should be profiled but no profiler and no engine recorded anything, else
    None. With the default roles and tool, also return None if torch is not installed.
    """
    items = [item for part in parts for item in part.expected if item.kind in ("trace", "engine")]
    wanted = any(role.profiler for role in config.roles.values())
    is_asked = config.roles != DEFAULT_ROLES or config.tool != "torch"
    nothing_lost = not is_asked and not is_installed(config.tool)
    if not wanted or nothing_lost or any(item.state != "skipped" for item in items):
        return None
    reasons = dict.fromkeys(item.reason or item.state for item in items)
    return (
        f"no profiler ran: {'; '.join(reasons) or 'no stage began that it would record'}. "
        'For spans alone, write roles: {"*": {profiler: off}}'
    )


def _is_left_out(config: ProfileConfig, part: ProcessPart) -> bool:
    """Return whether a process is not profiled because of its rank, while other ranks of its role are."""
    rank, size = part.process.rank, part.process.world_size
    matches = (config.role(role) for role in (part.process.role, *part.roles))
    is_profiled = any(match is not None and match[1].profiler for match in matches)
    return is_profiled and not part.recorded and rank is not None and size != 1
