"""What a training loop may tell stepscope: a mini-batch is done; now is a good moment to write files."""

from __future__ import annotations

from stepscope.recording import export, runtime


def advance() -> None:
    """One mini-batch is done: walks the profiler's schedule (`torch.schedule`). Without a capture,
    nothing.
    """
    session = runtime.active
    if session is not None:
        session.advance()


def flush(timeout_s: float = 60.0) -> list[str]:
    """Writes what is waiting to be written, deferred exports included. Call it where the process waits
    anyway.

    Blocks for up to `timeout_s`.

    Returns:
        Names of what is unfinished then.
    """
    return export.exporter().drain(timeout_s)
