"""What a training loop may tell stepscope: a mini-batch is done; write files now; capture what comes next."""

from __future__ import annotations

import os

from stepscope.recording import runtime


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
    from stepscope.recording import export  # loaded already where anything waits

    return export.exporter().drain(timeout_s)


def request_capture(
    steps: str = "next",
    *,
    roles: str | None = None,
    ranks: object = None,
    tool: str | None = None,
    seconds: float | None = None,
    expires_s: float = 3600,
    save_path: str | os.PathLike[str] | None = None,
) -> str:
    """Asks a run, this one or another, to capture steps that its configuration does not select.

    What `stepscope trigger` does. The run hears it when its next step begins.

    Args:
        steps: `next`, or steps as the configuration spells them: `17`, `20:40:10`.
        roles: A role or a glob in which the profiler runs; None: as configured.
        ranks: `all`, `first` or ranks; None: as configured.
        tool: Instead of the configured one.
        seconds: Instead of `budget.seconds`.
        expires_s: Forgotten if no step has begun by then.
        save_path: The run's folder; None: that of this process' configuration.

    Returns:
        The request's id; `stepscope trigger RUN --status` shows the answers to it.

    Raises:
        ConfigError: an argument is wrong.
        OSError: the folder cannot be written.
    """
    from stepscope.recording import requests, run

    request = requests.make(steps, roles=roles, ranks=ranks, tool=tool, seconds=seconds, expires_s=expires_s)
    requests.add(run.current().save_path if save_path is None else save_path, request)
    return request.id
