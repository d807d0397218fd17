"""`stepscope trigger`: requests to a run that is already running to capture steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

import stepscope
from stepscope.config import parse_steps
from stepscope.errors import CaptureError
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.requests import (
    Answer,
    AnswerState,
    Listening,
    Request,
    answers_by_now,
    change_requests,
    has_ended,
    read_listening,
    read_requests,
)
from stepscope_report.cli import screen
from stepscope_report.cli.command import Command, CommandError, Exit, GroupWithDefault
from stepscope_report.cli.find import no_run
from stepscope_report.formatting import moment
from stepscope_report.terminal_blocks import listing, table

POLL_S = 0.2
trigger = typer.Typer(
    cls=GroupWithDefault,
    help="Ask a live run for captures (`trigger RUN`), list what was asked for, or take it back.",
    no_args_is_help=True,
    add_completion=False,
)


RunFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of the run: its save_path.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="As JSON.")]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope trigger --json`."""

    format: int = 1
    requests: list[Request]
    listening: list[Listening]
    """Processes that listen for requests or did so, with their answers. A process no longer listens if it has
    `ended_ns` or no longer exists on its host."""


@trigger.command(cls=Command)
def ask(
    run: RunFolder,
    steps: Annotated[
        str, typer.Option(help="next, or steps: 40, 40-42, 40:60:10 (60 is not in it).")
    ] = "next",
    roles: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Run the profiler in these roles only.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="all, first, or ranks: 0,8-15.")] = None,
    tool: Annotated[str | None, typer.Option(help="Profiler to run instead of the configured one.")] = None,
    seconds: Annotated[float | None, typer.Option(help="End each capture after this many seconds.")] = None,
    last: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=10**9, help="Write the last N steps instead, from the flight recorder."
        ),
    ] = None,
    expires: Annotated[
        float, typer.Option(metavar="S", help="Drop the request if no step begins within this many seconds.")
    ] = 3600,
    next_run: Annotated[
        bool,
        typer.Option(
            "--next-run", help="If no process listens, leave the request for the next run in the folder."
        ),
    ] = False,
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to wait for answers.")] = 5.0,
    json: Json = False,
) -> None:
    """Ask a live run to capture steps that its configuration does not select. No restart, no port.

    `stepscope trigger RUN` is the same. `kill -USR1 PID` asks a process for its next step too. The process
    must open captures itself, and have called configure(), prepare() or its first capture(), without
    control.requests: false. Any other process is killed by the signal.
    """
    if not run.exists():  # a run that began a moment ago may have no folder yet
        with screen.waiting(f"waiting for {run}"):
            _comes(run.is_dir, wait)
    layout = _layout(run)
    if switch.DISABLED:
        raise CommandError(f"{switch.VARIABLE} is set here, so nothing is asked for. Fix: unset it")
    make = partial(
        stepscope.request_capture,  # this attribute loads the recorder, which takes 3 MB
        steps,
        roles=roles,
        ranks=ranks,
        tool=tool,
        seconds=seconds,
        expires_s=expires,
        save_path=run,
        last=last,
    )
    code, request = _ask(layout, make, wait, next_run=next_run)
    status = _show(layout, json=json)
    if any(_came_to_nothing(status, asked) for asked in status.requests if asked.id == request):
        code = Exit.INCOMPLETE
    raise typer.Exit(code)


@trigger.command("list", cls=Command)
def list_requests(run: RunFolder, json: Json = False) -> None:
    """List the requests of the last day and their answers. Exit code 3 if a request failed."""
    status = _show(_layout(run), json=json)
    failed = any(_came_to_nothing(status, asked) for asked in status.requests)
    raise typer.Exit(Exit.INCOMPLETE if failed else Exit.OK)


@trigger.command(cls=Command)
def cancel(
    run: RunFolder,
    request: Annotated[str, typer.Argument(metavar="ID", help="Id of the request, or all.")],
    json: Json = False,
) -> None:
    """Cancel a request that is still open."""
    layout = _layout(run)
    status = _status(layout)
    asked = [standing for standing in status.requests if request in ("all", standing.id)]
    if not asked and request != "all":
        known = ", ".join(sorted(standing.id for standing in status.requests)) or "none"
        raise CommandError(f"there is no request {request!r}. Allowed: all, or one of: {known}")
    open_ = [standing for standing in asked if _is_open(layout, status, standing)]
    gone = {standing.id: _captured_of(status, standing) for standing in open_}
    change_requests(
        layout, lambda standing: [kept for each in standing for kept in _without(each, gone.get(each.id))]
    )
    screen.say(f"taken back: {', '.join(gone) or 'none was open'}")
    over = [f"{standing.id} ({_state(status, standing)})" for standing in asked if standing.id not in gone]
    if over:
        screen.warn(f"not taken back, because no longer open: {', '.join(over)}")
    _show(layout, json=json)
    raise typer.Exit(Exit.INCOMPLETE if over and request != "all" else Exit.OK)


def _without(request: Request, captured: Sequence[int] | None) -> Sequence[Request]:
    """Return what remains after requests were cancelled: a request that was not cancelled (`captured` is
    None), or the last ten captured steps of a cancelled request.
    """
    if captured is None:
        return [request]
    last = ",".join(map(str, captured[-10:]))  # the text of a request is short
    return [msgspec.structs.replace(request, steps=last)] if captured else []


def _layout(run: Path) -> RunLayout:
    if run.is_dir():
        return RunLayout(run)
    if run.exists():
        raise CommandError(no_run(run))
    raise CommandError(
        f"{no_run(run)}. A run that listens has made its folder: within control.poll_seconds of its first "
        "capture(), unless control.requests is false"
    )


def _status(layout: RunLayout) -> Status:
    requests = read_requests(layout.control)
    listening = [answers_by_now(process, requests) for process in read_listening(layout)]
    return Status(requests=requests, listening=listening)


def _show(layout: RunLayout, *, json: bool) -> Status:
    status = _status(layout)
    if json:
        screen.show_json(status)
    else:
        screen.show(*_render(status))
    return status


def _ask(
    layout: RunLayout, ask: Callable[..., str], wait: float, *, next_run: bool
) -> tuple[Exit, str | None]:
    """Send the request to the processes that listen, or leave it for the next run.

    Return (exit code, id of the request). The id is None if no request was made.
    """
    with screen.waiting("waiting for a process that listens"):
        listens = _comes(lambda: not all(map(has_ended, read_listening(layout))), wait)
    try:
        request = ask(next_run=next_run)
    except CaptureError as error:
        screen.warn(str(error))
        return Exit.INCOMPLETE, None
    screen.say(f"asked: request {request}" + ("" if listens else ", for the next run in this folder"))
    if not listens:
        return Exit.OK, request
    with screen.waiting("waiting for answers"):
        heard = _comes(lambda: any(request in process.answers for process in read_listening(layout)), wait)
    if not heard:
        screen.warn(
            f"no answer within {wait:g} s. The request stands until it expires, and a step that begins "
            "before that hears it; `stepscope trigger list RUN` shows the answers"
        )
    return Exit.OK if heard else Exit.INCOMPLETE, request


def _came_to_nothing(status: Status, request: Request) -> bool:
    """Return True if the request was refused, was captured badly, or has expired."""
    answers = [answer for _, answer in _answers(status, request)]
    if any(answer.state == "refused" or (answer.state == "captured" and answer.reason) for answer in answers):
        return True
    if any(answer.state in ("heard", "captured") for answer in answers):
        return False
    return bool(answers) or _is_over(request)


def _answers(status: Status, request: Request) -> list[tuple[Listening, Answer]]:
    return [
        (process, process.answers[request.id])
        for process in status.listening
        if request.id in process.answers
    ]


def _is_open(layout: RunLayout, status: Status, request: Request) -> bool:
    """Return True if a process may still capture a step of the request."""
    answers = _answers(status, request)
    if layout.claimed(request.id).exists():  # `next` has begun; answers say so seconds later
        return False
    return any(_goes_on(request, *each) for each in answers) if answers else not _is_over(request)


def _goes_on(request: Request, process: Listening, answer: Answer) -> bool:
    if answer.state != "captured":
        return answer.state == "heard"
    if has_ended(process) or request.last is not None or request.steps == "next":
        return False
    reached = max([*answer.steps, process.step or 0])
    return any(steps.goes_beyond(reached) for steps in parse_steps(request.steps, "steps"))


def _captured_of(status: Status, request: Request) -> list[int]:
    return sorted({step for _, answer in _answers(status, request) for step in answer.steps})


def _state(status: Status, request: Request) -> AnswerState:
    """Return the state of a request that is no longer open. One process that captured is enough."""
    states = [answer.state for _, answer in _answers(status, request)]
    return "captured" if "captured" in states else next(iter(states), "expired")


def _is_over(request: Request) -> bool:
    return time.time_ns() > request.expires_ns


def _comes(holds: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if not time.monotonic() < until:  # also if `seconds` is not a number
            return False
        time.sleep(POLL_S)
    return True


def _render(status: Status) -> Sequence[RenderableType]:
    if not status.requests:
        return [Text("no requests"), *_who(status.listening)]
    requests = [
        (
            request.id,
            request.steps if request.last is None else f"last {request.last}",
            _different(request),
            moment(request.expires_ns),
        )
        for request in status.requests
    ]
    parts: list[RenderableType] = [
        table("Requests", ("id", "steps", "different from the configuration", "expires"), requests)
    ]
    answers: list[tuple[str, ...]] = [
        (name, f"{process.host} pid {process.pid}", answer.state, _steps(answer.steps), answer.reason or "")
        for process in status.listening
        for name, answer in process.answers.items()
    ]
    answers += [
        (name, f"  {worker}", "captured" if outcome == "began" else "absent", _steps(answer.steps[-1:]),
         "" if outcome == "began" else outcome)
        for process in status.listening
        for name, answer in process.answers.items()
        for worker, outcome in answer.others.items()
    ]  # fmt: skip
    heard = {name for process in status.listening for name in process.answers}
    answers += [
        (request.id, "nobody", "expired", "", "no process heard it in time")
        for request in status.requests
        if request.id not in heard and _is_over(request)
    ]
    if answers:
        parts.append(table("Answers", ("id", "process", "state", "steps", "reason"), answers))
    return [*parts, *_who(status.listening)]


def _who(listening: Sequence[Listening]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for title, ended in (("Listening", False), ("Ended", True)):
        lines = [
            f"{process.role} {process.host} pid {process.pid}, "
            + ("before its first step" if process.step is None else f"at step {process.step}")
            for process in listening
            if has_ended(process) == ended
        ]
        parts += [listing(title, lines)] if lines else []
    return parts or [Text("nobody listens")]


def _different(request: Request) -> str:
    settings = [
        f"{name} {value}"
        for name in ("tool", "roles", "ranks", "seconds")
        if (value := getattr(request, name)) is not None
    ]
    because = "" if request.because is None else f"asked by the flight recorder: {request.because}"
    return ", ".join(filter(None, (*settings, because))) or "nothing"


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
