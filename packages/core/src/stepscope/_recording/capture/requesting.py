"""Requests for captures on demand, in the run's folder. `on_demand` answers them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from stepscope._recording.capture import configure, on_demand
from stepscope._recording.process import run
from stepscope.config import ProfileConfig, check_tool
from stepscope.errors import CaptureError, ConfigError
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.requests import Request, change_requests, has_ended, read_listening

_DAY_NS = 86_400 * 10**9


def request_capture(
    steps: str = "next",
    *,
    roles: str | None = None,
    ranks: str | int | Sequence[int] | None = None,
    tool: str | None = None,
    seconds: float | None = None,
    expires_s: float = 3600,
    save_path: str | os.PathLike[str] | None = None,
    next_run: bool = False,
    last: int | None = None,
) -> str:
    """Request that a run, this one or another, captures steps that its configuration does not select.

    This is the function behind `stepscope trigger`. The run sees the request when its next step begins.

    Args:
        steps: `next`, or steps as the configuration spells them: `17`, `20:40:10`.
        roles: A role or a glob in which the profiler runs, or None to keep the configuration.
        ranks: `all`, `first`, `0,8-15`, a rank or several, or None to keep the configuration.
        tool: Profiler to use, or None for the configured one.
        seconds: Replacement for `budget.seconds`, or None.
        expires_s: Time after which the request is dropped if none of its steps has begun.
        save_path: The run's folder, or None for the folder in this process' configuration.
        next_run: True to make the request even if no run listens in that folder, for its next run.
        last: Number of past steps to write from the flight recorder, in place of a capture.

    Returns:
        The request's id; `stepscope trigger list RUN` shows the answers to it. With STEPSCOPE_DISABLE=1
        nothing is asked, and it is empty.

    Raises:
        ConfigError: an argument is wrong.
        CaptureError: nobody listens in that folder: its run has ended, or has not begun.
        OSError: the folder cannot be written.
    """
    if switch.DISABLED:
        return ""
    if last is not None and (type(last) is not int or last < 1):
        raise ConfigError("request_capture(last)", last, "a whole number >= 1, or None", "write last=5")
    settings: dict[str, object] = {"steps": [0] if steps == "next" else steps}
    if roles is not None or ranks is not None:
        settings["roles"] = {roles or "*": {} if ranks is None else {"ranks": ranks}}
    if tool is not None:
        settings["tool"] = tool
    if seconds is not None:
        settings["budget"] = {"seconds": seconds}
    checked = ProfileConfig.from_mapping(settings)
    if tool is not None:
        check_tool(checked)
    chosen = next(iter(checked.roles.values())).ranks
    now_ns = time.time_ns()
    layout = RunLayout(configure.current().save_path if save_path is None else save_path)
    request = Request(
        id=os.urandom(4).hex(),
        steps="next" if steps == "next" else ",".join(str(steps_range) for steps_range in checked.steps),
        roles=roles,
        ranks=None if ranks is None else chosen if isinstance(chosen, str) else list(chosen),
        tool=tool,
        seconds=seconds,
        last=last,
        created_ns=now_ns,
        expires_ns=now_ns + int(expires_s * 1e9),
        runs=_runs_that_listen(
            layout, own=save_path is None, next_run=next_run, of_the_past=last is not None
        ),
    )
    change_requests(layout, lambda standing: [*_living(standing), request])
    return request.id


def _runs_that_listen(layout: RunLayout, *, own: bool, next_run: bool, of_the_past: bool) -> list[str] | None:
    """Return the ids of the runs that listen in a folder, or None for the next run in it.

    Args:
        own: True if the folder is that of this process' run, which need not listen yet.
        of_the_past: True if past steps are requested, which a next run does not have.

    Raises:
        CaptureError: no run listens, and the request is not for the next run.
    """
    known = read_listening(layout)
    living = [process for process in known if not has_ended(process)]
    if living and all(process.run_id for process in living):
        return sorted({process.run_id for process in living} | ({run.run_id()} if own else set()))
    if living or own or next_run or on_demand.listens_here(os.fspath(layout.root)):
        return None
    last = known[-1] if known else None
    why = (
        "Is it the run's save_path? A run listens from its first capture() on, unless control.requests is "
        "false"
        if last is None
        else f"The run has ended ({last.role}, {last.host} pid {last.pid})"
    )
    fix = "Fix: next_run=True (`stepscope trigger --next-run`) asks the next run in this folder"
    if of_the_past:
        fix = "The steps that a run keeps in memory end with it"
    raise CaptureError(f"nobody listens in {layout.root}, and nothing was asked. {why}. {fix}")


def _living(standing: list[Request]) -> list[Request]:
    """Return the requests that ended less than a day ago or are open, because their answers may still be
    read.
    """
    return [request for request in standing if request.expires_ns > time.time_ns() - _DAY_NS]
