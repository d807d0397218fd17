"""The `*` of processes that a profiler recorded."""

from __future__ import annotations

PROFILED = "*: a profiler recorded this process and slowed it."


def starred(name: str, profiled: bool) -> str:
    """Return the name of a process, with a `*` if a profiler recorded it."""
    return f"{name}*" if profiled else name


def say_profiled(*profiled: bool) -> str:
    """Return the note on `*`. Empty if none has it."""
    return PROFILED if any(profiled) else ""
