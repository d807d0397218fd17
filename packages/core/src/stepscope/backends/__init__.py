"""Profilers of this process, behind one Protocol. The entry points `stepscope.backends` name them."""

from __future__ import annotations

from stepscope.backends.protocol import Backend, PendingArtifact, SpanInfo, Window, load_backend

__all__ = ["Backend", "PendingArtifact", "SpanInfo", "Window", "load_backend"]
