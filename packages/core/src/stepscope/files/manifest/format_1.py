"""Parts of the manifest in format 1, which distinguished states by their reasons."""

from __future__ import annotations

from typing import Any

from stepscope.files.manifest.records import FORMAT, EndedBy, Kind, Pending

_PENDING: dict[str, Pending] = {
    "the process has not closed its capture": "closing",
    "not exported yet": "exporting",
    "on its own host, which shares no folder with this one; not fetched yet": "fetching",
    "it has not run yet": "running",
}
_KINDS: dict[str, Kind] = {
    "spans": "spans",
    "replica ": "engine",
    "files of ": "fetch",
    "finish command": "after",
    "scalars": "after",
    "mirror": "after",
    "on_": "after",
    "roles.": "selection",
    "workers": "selection",
    "CUDA out of memory": "memory",
}
"""Beginning of a name -> its kind."""
_ENDS: dict[str, EndedBy] = {
    "the process was terminated (SIGTERM)": "signal",
    "the process exited": "exit",
}


def from_format_1(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of format 1, as JSON has it, in format 2.

    Raises:
        AttributeError, KeyError, TypeError: it is no such part.
    """
    error: str | None = part.get("error")
    expected = [{**item, **_typed(item)} for item in part["expected"]]
    return {**part, "format": FORMAT, "expected": expected, "ended_by": _ended_by(error)}


def _typed(item: dict[str, Any]) -> dict[str, Any]:
    kind, reason, state = _kind(item["name"]), item.get("reason") or "", item["state"]
    pending: Pending | None = _PENDING.get(reason) if state == "missing" else None
    # An engine failed with the words of an engine; only a stop past its deadline said that files may come.
    if kind == "engine" and state in ("failed", "partial"):
        pending = "late" if reason.endswith("its files may still come") else None
    return {"kind": kind, "pending": pending, "state": "pending" if pending not in (None, "late") else state}


def _kind(name: str) -> Kind:
    if " trace" in name:
        return "trace"
    if " rank " in name:
        return "selection"
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "after")


def _ended_by(error: str | None) -> EndedBy | None:
    if error is None:
        return None
    return next((by for start, by in _ENDS.items() if error.startswith(start)), "exception")
