"""`run.json`: the record of a run. The capture's owner writes it when the first capture opens."""

from __future__ import annotations

import msgspec

from stepscope.files.clock import Int


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    format: Int = 1
    run_id: str
    started_ns: Int
    """Unix ns."""
    host: str
    pid: Int
    command: tuple[str, ...]
    config: dict[str, object]
    """The resolved configuration; `ProfileConfig.from_mapping` reads it back."""
    versions: dict[str, str]
