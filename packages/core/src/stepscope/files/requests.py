"""Requests for captures of a live run in `control.json`, and the answers of processes in `control/`.

Both sides poll files, so no process listens on a port. The files are bounded in size, match a schema, and
contain no paths, commands or code. Names that become part of a path are hex digits.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import Int
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import decode, is_running, private, read_file, read_records, write_atomic

MAX_BYTES = 64 << 10
MAX_REQUESTS = 64
MAX_TEXT = 200

Id: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: steps to capture, and settings that replace the run's configuration for these steps."""

    id: Id
    steps: Text
    """`next`, or steps as the configuration spells them: `17`, `20:40:10`."""
    roles: Text | None = None
    """A role or a glob. The profiler runs only in roles that match; None keeps the configuration."""
    ranks: Literal["all", "first"] | list[Rank] | None = None
    tool: Text | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Value that replaces `budget.seconds`; None keeps the configuration."""
    because: Text | None = None
    """The event that made stepscope create the request, or None if a person created it."""
    last: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of past steps that the flight recorder should write (`steps` is then ignored); None for a
    capture."""
    created_ns: Int
    expires_ns: Int
    """Unix time in ns after which the request is ignored."""
    runs: list[Annotated[str, msgspec.Meta(max_length=200)]] | None = None
    """Ids of the runs that the request is for, because they listened when it was made; None for any run."""


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `control.json`."""

    format: Literal[1] = 1
    requests: Annotated[list[Request], msgspec.Meta(max_length=MAX_REQUESTS)] = []


AnswerState: TypeAlias = Literal["heard", "captured", "refused", "missed", "expired"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one process to one request."""

    state: AnswerState
    """State of the request in the process. `heard`: the process will capture. `captured`: it captured, or
    tried to capture, at least one step. `reason` explains other states."""
    steps: list[Int] = []
    """The steps captured so far."""
    reason: str | None = None
    """The reason for `refused`, `missed` or `expired`, or what went wrong with `captured` steps; else
    None."""
    others: dict[str, str] = {}
    """{worker or replica: `began`, or the reason why it takes no part} in the latest capture. Workers need
    not see this folder."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The file in `control/` of one process that polls `control.json`."""

    format: Int = 1
    host: str
    pid: Int
    role: str
    rank: Int | None
    since_ns: Int
    step: Int | None
    """The last step that began in the process, or None before the first."""
    answers: dict[str, Answer] = {}
    """{request id: answer}."""
    run_id: str = ""
    ended_ns: Int | None = None
    """Unix time in ns at which the process stopped listening, or None if it still listens or was killed."""
    failed: bool = False
    """True if an exception that nothing caught ended the process."""
    imported_ns: Int = 0
    """Unix time in ns at which the process had imported stepscope."""
    world_size: Int | None = None
    selects: str = ""
    """The settings `steps` and `record` of the process' configuration, as one text."""

    @property
    def process(self) -> ProcessInfo:
        return ProcessInfo(
            role=self.role, rank=self.rank, world_size=self.world_size, host=self.host, pid=self.pid
        )


def read_requests(path: Path) -> list[Request]:
    """Return the requests in a `control.json`; empty if it does not exist.

    Raises:
        RecordError: the file is too large, incomplete, or does not contain requests.
    """
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    try:
        return decode(data, Control).requests
    except RecordError as error:
        raise RecordError(f"{path}: {error}. Fix: remove this file, and ask again") from None


def change_requests(layout: RunLayout, change: Callable[[list[Request]], list[Request]]) -> list[Request]:
    """Replace the requests in `control.json` by `change(requests)`, atomically, and return the new requests.
    A lock admits one writer at a time.

    A file that cannot be read counts as empty.

    Raises:
        RecordError: readers would refuse the changed requests. Nothing is written.
    """
    layout.root.mkdir(parents=True, exist_ok=True)
    with _alone(layout.control):
        try:
            requests = read_requests(layout.control)
        except RecordError:
            requests = []
        changed = change(requests)[-MAX_REQUESTS:]
        data = msgspec.json.format(msgspec.json.encode(Control(requests=changed)))
        decode(data, Control)  # else readers would refuse all requests
        if len(data) > MAX_BYTES:
            raise RecordError(f"{layout.control} would exceed {MAX_BYTES} bytes. Fix: name fewer ranks")
        write_atomic(layout.control, data)
    return changed


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    import fcntl

    # O_NOFOLLOW, so that a planted link is not followed. The lock file stays empty.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
    try:
        with suppress(OSError):  # the file system has no locks: the last writer wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_listening(layout: RunLayout, host: str | None = None) -> list[Listening]:
    """Return a record for each process that polls or has polled this run's `control.json`, in the order of
    file names. With `host`, only processes of that host are returned.
    """
    return read_records(layout.listener_files(host), Listening)


_APART_NS = 60 * 10**9
"""Longest time between the starts of two ranks of one attempt, including the difference of their hosts'
clocks."""


def peers_of(own: Listening, known: Sequence[Listening]) -> list[Listening]:
    """Return the other ranks of a process' job among `known`; for each rank, only the process that began
    last.

    Ranks of another run, role or earlier attempt are left out.
    """
    last: dict[int, Listening] = {}
    for one in sorted(known, key=lambda one: one.since_ns):
        is_of_job = (one.run_id, one.role, one.world_size) == (own.run_id, own.role, own.world_size)
        if one.rank is not None and is_of_job and is_of_attempt(one, own):
            last[one.rank] = one
    return [] if own.rank is None else [one for rank, one in last.items() if rank != own.rank]


def is_of_attempt(one: Listening, own: Listening) -> bool:
    """Return whether a process began with or after the attempt of `own`, so not in an earlier attempt."""
    return one.since_ns >= own.imported_ns - _APART_NS


def has_died(listening: Listening) -> bool:
    """Return whether a process was killed or ended by an exception. Return False for a process that was
    killed on another host.
    """
    return listening.failed or (listening.ended_ns is None and has_ended(listening))


def has_ended(listening: Listening) -> bool:
    """Return whether a process has stopped listening. Return False for a process that was killed on another
    host.
    """
    here = listening.host == socket.gethostname()
    return listening.ended_ns is not None or (here and not is_running(listening.pid))


def answer_by_now(request: Request, answer: Answer, *, gone: str | None) -> Answer:
    """Return `answer`. If its state is `heard`, and the request has expired or the process has ended, return
    the final answer instead.

    Args:
        gone: The reason why the process cannot capture any more, or None if it can.
    """
    if answer.state != "heard":
        return answer
    if time.time_ns() > request.expires_ns:
        return Answer(state="expired", reason="no requested step began in time")
    return answer if gone is None else Answer(state="missed", reason=gone)


def answers_by_now(listening: Listening, requests: Sequence[Request]) -> Listening:
    """Return `listening` with its answers to `requests`, updated by `answer_by_now`. Call this on the host
    of the process, because another host cannot find out whether the process still runs.
    """
    gone = None
    if has_ended(listening):
        gone = "its process ended before such a step began"
    by_id = {request.id: request for request in requests}
    answers = {
        name: answer_by_now(by_id[name], answer, gone=gone)
        for name, answer in listening.answers.items()
        if name in by_id
    }
    return msgspec.structs.replace(listening, answers=answers)


def write_listening(layout: RunLayout, listening: Listening) -> None:
    write_atomic(layout.listener(listening.host, listening.pid), msgspec.json.encode(listening))


def claim_step(layout: RunLayout, request_id: str, step: int) -> int:
    """Return the step that a request for `next` captures: the `step` of the first process that calls this."""
    path = layout.claimed(request_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", opener=private) as file:
            file.write(f"{step}\n")
        return step
    except FileExistsError:
        try:
            text = read_file(path, MAX_BYTES).decode("ascii", errors="replace").strip()
        except (OSError, RecordError):
            return step
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else step
