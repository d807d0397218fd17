"""What is written of a span's attributes and error: bounded in size, and redacted before that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from stepscope.files.values import AttrValue, settled_value
from stepscope.recording.process import failures

MAX_KEY = 100
MAX_COUNT = 64
"""Attributes kept of a span; how many more there were stands in `attributes_left_out`."""
REDACTED = "[redacted]"

hook: Callable[[str, AttrValue], AttrValue] | None = None
"""Sees every attribute that is to be written. One writer: `stepscope.recording.after.hooks`."""


def written(attrs: Mapping[str, AttrValue], patterns: tuple[str, ...]) -> dict[str, AttrValue]:
    """The attributes as they may be written.

    Args:
        patterns: `redact` of the configuration.
    """
    kept = attrs if len(attrs) <= MAX_COUNT else dict(list(attrs.items())[:MAX_COUNT])
    if not patterns and hook is None:
        found = {_key(key): settled_value(value) for key, value in kept.items()}
    else:
        found = {
            _key(key): settled_value(_redacted(str(key), settled_value(value), patterns))
            for key, value in kept.items()
        }
    if kept is not attrs:
        found["attributes_left_out"] = len(attrs) - MAX_COUNT
    return found


def error_of(text: str | None, patterns: tuple[str, ...]) -> str | None:
    """An exception's text, which may quote what it was raised for: redacted as the attribute `error`."""
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
    except Exception as error:
        failures.note("the redact hook", error)
        return REDACTED  # it did not say that this may be written


@lru_cache(maxsize=4096)
def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _key(key: object) -> str:
    text = str(key)
    return text if len(text) <= MAX_KEY else text[:MAX_KEY] + "..."
