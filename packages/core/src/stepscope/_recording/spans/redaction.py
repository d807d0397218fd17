"""Attributes and errors of spans before they are written: redaction, and limits of size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files.values import AttrValue, attr_value

MAX_KEY = 100
MAX_COUNT = 64
"""Largest number of attributes that are written for a span. The attribute `attributes_left_out` has the
number of further attributes."""
REDACTED = "[redacted]"

hook: Callable[[str, AttrValue], AttrValue] | None = None
"""Function of the user that is called for every attribute before it is written, or None. One writer:
`stepscope._recording.session.hooks`."""


def written(attrs: Mapping[str, AttrValue], patterns: tuple[str, ...]) -> dict[str, AttrValue]:
    """Return the attributes redacted and limited.

    Args:
        patterns: `redact` of the configuration.
    """
    kept = attrs if len(attrs) <= MAX_COUNT else dict(list(attrs.items())[:MAX_COUNT])
    if not patterns and hook is None:
        safe = {_key(key): attr_value(value) for key, value in kept.items()}
    else:
        safe = {
            _key(key): attr_value(_redacted(str(key), attr_value(value), patterns))
            for key, value in kept.items()
        }
    if kept is not attrs:
        safe["attributes_left_out"] = len(attrs) - MAX_COUNT
    return safe


def error_of(text: str | None, patterns: tuple[str, ...]) -> str | None:
    """Return the text of an exception, redacted as the attribute `error`, because it may contain the user's
    data.
    """
    if text is None or (not patterns and hook is None):
        return text
    kept = _redacted("error", text, patterns)
    return text if kept == text else f"{text.partition(':')[0]}: {kept}"[:200]


def _redacted(key: str, value: AttrValue, patterns: tuple[str, ...]) -> AttrValue:
    if patterns and _matches(key, patterns):
        return REDACTED
    if hook is None:
        return value
    try:
        return hook(key, value)
    except ours() as error:
        failures.note("the redact hook", error)
        return REDACTED  # the value might be secret


@lru_cache(maxsize=4096)
def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _key(key: object) -> str:
    text = str(key)
    return text if len(text) <= MAX_KEY else text[:MAX_KEY] + "..."
