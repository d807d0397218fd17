"""Profilers of this process, behind one Protocol. Found by name through the entry points
`stepscope.backends`.
"""

from __future__ import annotations

from stepscope.backends.protocol import Backend, PendingArtifact, SpanInfo, Window, load_backend

__all__ = ["Backend", "PendingArtifact", "SpanInfo", "Window", "load_backend"]
