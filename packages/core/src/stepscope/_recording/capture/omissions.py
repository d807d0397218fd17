"""Things that a capture lacks and its user should know: workers it was not given, roles that nobody has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from stepscope._recording.output.manifest_part import ManifestPart
from stepscope._recording.process import failures
from stepscope._recording.process.identity import is_first
from stepscope.config import ProfileConfig, RoleConfig
from stepscope.config._profile import DEFAULT_ROLES
from stepscope.config._words import closest
from stepscope.errors import ours
from stepscope.files.manifest.records import OpenedBy, ProcessPart

WORKERS, PROFILER = "workers", "profiler"
"""Their names in the manifest."""

_prepared = False
"""True if `prepare` was given workers in this process. One writer: `workers_prepared`."""


def none_meant(group: object) -> bool:
    """Return whether `workers={}` or `workers=[]` was written: there are to be none."""
    return isinstance(group, Mapping | Sequence) and not isinstance(group, str) and not group


def workers_prepared() -> None:
    """`prepare` was given workers here, so every capture is expected to be given them."""
    global _prepared
    _prepared = True


def enter_missing_workers(manifest_part: ManifestPart, *, engines: bool, opened_by: OpenedBy) -> None:
    """Enter that a capture that names no workers probably lacks them, if something says so."""
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
        if engines or worker is None or worker.mode != ray.SCRIPT_MODE:  # an actor, a task
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
    """Enter roles of the configuration that match nothing in a whole capture, and that no profiler ran."""
    roles = {role for part in parts for role in (part.process.role, *part.roles)}
    unmatched = unmatched_roles(config.roles, roles | {"rollout"} if engines else roles, "in this capture")
    for pattern, reason in unmatched.items():
        failures.warn_once(reason)
        manifest_part.lack(f"roles.{pattern}", reason, kind="selection")
    # A rank that `ranks` leaves out says nothing of the others, of which there may be no parts.
    by_rank = any(_is_left_out(config, part) for part in parts)
    why_none = None if unmatched or by_rank else no_profiler(config, parts)
    if why_none is not None:
        failures.warn_once(why_none)
        enter = manifest_part.skip if config.roles == DEFAULT_ROLES else manifest_part.lack
        enter(PROFILER, why_none, kind="selection")


def tell_missed(parts: Iterable[ProcessPart]) -> None:
    """Log what presets name and a process lacks, once a name, if no process has logged it.

    The main process and rank 0 have logged what they lack themselves.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    patch = sys.modules.get("stepscope._recording.instrument.patch")
    logged = patch.missed if patch is not None and is_first() else {}
    for place, reason in (item for part in parts for item in part.missed.items()):
        if place not in logged:
            failures.warn_once(f"disabled {place}; training continues: {reason}")


def unmatched_roles(patterns: Mapping[str, RoleConfig], roles: Iterable[str], where: str) -> dict[str, str]:
    """Patterns of the configuration that match none of the roles: {pattern: what to say}. None of the
    defaults, which nobody wrote, and none that asks for spans alone.

    Args:
        where: Behind "roles", whose they are: `in this capture`.
    """
    if patterns == DEFAULT_ROLES:
        return {}
    roles = sorted(set(roles))
    unmatched = {}
    for pattern, settings in patterns.items():
        if pattern.strip("*") and settings.profiler and not any(fnmatchcase(role, pattern) for role in roles):
            near = closest(pattern, roles)
            unmatched[pattern] = f"roles.{pattern} matched nothing; roles {where}: {', '.join(roles)}." + (
                f" Did you mean {near!r}?" if near else ""
            )
    return unmatched


def no_profiler(config: ProfileConfig, parts: Iterable[ProcessPart]) -> str | None:
    """Return why no profiler and no engine recorded anything, though some role is to be profiled."""
    items = [item for part in parts for item in part.expected if item.kind in ("trace", "engine")]
    wanted = any(role.profiler for role in config.roles.values())
    if not wanted or any(item.state != "skipped" for item in items):
        return None
    reasons = dict.fromkeys(item.reason or item.state for item in items)
    return (
        f"no profiler ran: {'; '.join(reasons) or 'no stage began that it would record'}. "
        'For spans alone, write roles: {"*": {profiler: off}}'
    )


def _is_left_out(config: ProfileConfig, part: ProcessPart) -> bool:
    """Return whether a process is not profiled because of its rank, where other ranks of its role are."""
    rank, size = part.process.rank, part.process.world_size
    matches = (config.role(role) for role in (part.process.role, *part.roles))
    is_profiled = any(match is not None and match[1].profiler for match in matches)
    return is_profiled and not part.recorded and rank is not None and size != 1
