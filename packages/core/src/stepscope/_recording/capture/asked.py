"""Requests to capture one step, and to close its capture. Checks of what a user writes there."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError, ours
from stepscope.files.manifest.records import Ending, OpenedBy


class Asked(NamedTuple):
    """A step to capture, and who takes part."""

    step: int
    config: ProfileConfig
    workers: object
    engines: object
    role: str
    rank: int | None
    names_workers: bool
    """True if `workers` was passed, even an empty one."""
    on_request: bool
    """True if the step was requested while the run went on."""
    opened_by: OpenedBy


class Closing(NamedTuple):
    """A call that closes a capture."""

    ending: Ending | None = None
    """The cause of an early end; None if the capture ends normally."""
    deadline_s: float | None = None
    """The time limit for each worker and engine, or None for `budget.fanout_seconds`."""
    discard: str | None = None
    """The reason why the recording is unwanted; None to keep it."""


def step_of(value: object) -> int:
    """Return the number of a step: an int, or an integer of numpy or torch."""
    step = _whole(value)
    if step is None:
        raise ConfigError(
            "capture(step)", value, "an integer, 0 or more", "pass the training loop's global step"
        )
    return step


def rank_of(value: object) -> int | None:
    """Return a rank, as `step_of`; None stands for itself."""
    rank = _whole(value)
    if rank is None and value is not None:
        fix = "leave it out, or pass rank=torch.distributed.get_rank()"
        raise ConfigError("capture(rank)", value, "an integer, 0 or more, or None", fix)
    return rank


def check_asked(call: str, role: object, config: object, workers: object) -> None:
    """Raise `ConfigError` for a role or a configuration that the function `call` cannot take."""
    named = [name for name in workers if isinstance(name, str)] if isinstance(workers, Mapping) else []
    for argument, name in (("role", role), *(("workers", name) for name in named)):
        if not (isinstance(name, str) and _ROLE.fullmatch(name)):
            fix = 'name the work of the process: "actor"'
            raise ConfigError(f"{call}({argument})", name, "a word of letters, digits and . _ - / :", fix)
    if config is not None and not isinstance(config, ProfileConfig):
        fix = f"pass ProfileConfig.from_mapping(...), or call configure(...) once and {call}() without config"
        raise ConfigError(f"{call}(config)", config, "a ProfileConfig, or None", fix)


_ROLE = re.compile(r"[\w.:/-]{1,500}")


def _whole(value: Any) -> int | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except ours():  # text, a fraction, a tensor of several numbers
        return None
    return number if number >= 0 else None
