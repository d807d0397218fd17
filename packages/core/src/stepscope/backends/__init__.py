"""Profilers that run in this process. Each implements `Backend` and is an entry point
`stepscope.backends`.
"""

from __future__ import annotations

from stepscope.backends.protocol import Backend, PendingArtifact, SpanInfo, Window, load_backend

__all__ = ["Backend", "PendingArtifact", "SpanInfo", "Window", "load_backend"]
