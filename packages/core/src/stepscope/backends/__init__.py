"""Profilers that run in this process. Each is a `Backend`, and is registered as an entry point of the group
`stepscope.backends`.
"""

from __future__ import annotations

from stepscope.backends.protocol import Backend, PendingArtifact, SpanInfo, Window, load_backend

__all__ = ["Backend", "PendingArtifact", "SpanInfo", "Window", "load_backend"]
