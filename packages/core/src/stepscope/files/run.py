"""`run.json`: what a run was, written by the capture's owner when the run's first capture opens."""

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
    """As resolved; `ProfileConfig.from_mapping` reads it back."""
    versions: dict[str, str]
