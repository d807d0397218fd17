"""The arguments of a capture and of its close, and checks of the user's arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError, ours
from stepscope.files.clock import MOST
from stepscope.files.manifest import Ending, OpenedBy


class Asked(NamedTuple):
    """The arguments of one capture."""

    step: int
    config: ProfileConfig
    workers: object
    engines: object
    role: str
    rank: int | None
    names_workers: bool
    """True if the user passed `workers`, even if it was empty."""
    on_request: bool
    """True if the step was requested during the run (`stepscope trigger`)."""
    opened_by: OpenedBy


class Closing(NamedTuple):
    """The arguments for closing a capture."""

    ending: Ending | None = None
    """Cause of an early end, or None if the capture ends normally."""
    deadline_s: float | None = None
    """Time limit for each worker and engine; None means `budget.fanout_seconds`."""
    discard: str | None = None
    """The reason to discard the recording, or None to keep it."""


def step_of(value: object) -> int:
    """Return a step number as an int. Integers of numpy and torch are accepted.

    Raises:
        ConfigError: `value` is not an integer from 0 to 2**62.
    """
    step = _whole(value)
    if step is None or step > MOST:
        fix = "pass the training loop's global step"
        raise ConfigError("capture(step)", value, "an integer from 0 to 2**62", fix)
    return step


def rank_of(value: object) -> int | None:
    """Return a rank as an int, or None if `value` is None. Integers of numpy and torch are accepted.

    Raises:
        ConfigError: `value` is something else, or is negative.
    """
    if value is None:
        return None
    rank = _whole(value)
    if rank is None:
        fix = "leave it out, or pass rank=torch.distributed.get_rank()"
        raise ConfigError("capture(rank)", value, "an integer, 0 or more, or None", fix)
    return rank


def check_asked(call: str, role: object, config: object, workers: object) -> None:
    """Check the arguments of a public function.

    Args:
        call: Name of the function, for the message.

    Raises:
        ConfigError: the role, a role in `workers`, or the configuration is invalid.
    """
    _check_role(f"{call}(role)", role)
    if workers is not None and isinstance(workers, Mapping):
        for name in workers:
            if isinstance(name, str):
                _check_role(f"{call}(workers)", name)
    if config is not None and not isinstance(config, ProfileConfig):
        fix = f"pass ProfileConfig.from_mapping(...), or call configure(...) once and {call}() without config"
        raise ConfigError(f"{call}(config)", config, "a ProfileConfig, or None", fix)


_ROLE = re.compile(r"[\w.:/-]{1,500}")
_checked: str | None = None
"""The role that was checked last, or None before the first check. Cached because a loop passes the same role
in each step. One writer: `_check_role`."""


def _check_role(field: str, role: object) -> None:
    global _checked
    if role is _checked and role is not None:
        return
    if not (isinstance(role, str) and _ROLE.fullmatch(role)):
        fix = 'name the work of the process: "actor"'
        raise ConfigError(field, role, "a word of letters, digits and . _ - / :", fix)
    _checked = role


def _whole(value: Any) -> int | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except ours():  # not an integer: for example text, a float, or a tensor of several numbers
        return None
    return number if number >= 0 else None
