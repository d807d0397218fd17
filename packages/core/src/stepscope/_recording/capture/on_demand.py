"""Captures on demand: a request in the run's folder, or a signal, selects another step.

`control.json` is checked when a step begins (one `stat`), and by a thread every few seconds, so that requests
are answered soon. Only processes that open captures listen. Their workers and engines take part as in any
capture. A wrong request does not raise an error in the training loop; its answer states why it is refused.

This file has more than 500 lines, because asking, hearing and answering share the state of one request.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from stepscope._recording.capture import configure
from stepscope._recording.process import failures, fork, identity, shutdown
from stepscope._recording.process.identity import identify, is_alone
from stepscope._recording.spans import slot
from stepscope.config import ProfileConfig, StepRange, check_tool
from stepscope.errors import CaptureError, ConfigError, RecordError, ours
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope.files.requests import (
    MAX_REQUESTS,
    MAX_TEXT,
    Answer,
    AnswerState,
    Listening,
    Request,
    answer_by_now,
    change_requests,
    claim_step,
    has_ended,
    read_listening,
    read_requests,
    write_listening,
)
from stepscope.files.sidecar import ProcessInfo

_DAY_NS = 86_400 * 10**9
_LONGEST_S = 10**9


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
    """Request that a run captures steps which its configuration does not select.

    `request_capture("next", roles="actor")` captures the next step. The run, in this or another process,
    reads the request when its next step begins. `stepscope trigger` calls this function.

    Args:
        steps: `next`, or steps as the configuration spells them: `17`, `20:40:10`.
        roles: A role or a glob. The profiler runs in roles that match; None keeps the configuration.
        ranks: `all`, `first`, `0,8-15`, a rank or a sequence of ranks; None keeps the configuration.
        tool: Profiler to use; None keeps the configuration.
        seconds: Longest time in s that a requested capture stays open (`budget.seconds`); None keeps the
            configuration.
        expires_s: Seconds after which the request expires if none of its steps has begun.
        save_path: The run's folder. By default the folder in this process' configuration.
        next_run: True to request captures of the next run in the folder if no run listens now.
        last: Number of past steps that the flight recorder should write, in place of a capture.

    Returns:
        The request's id. `stepscope trigger list RUN` shows the answers to the request. With
            STEPSCOPE_DISABLE=1, nothing is requested and the id is empty.

    Raises:
        ConfigError: an argument is wrong, or all processes that listen have passed the steps.
        CaptureError: no run listens in the folder, because it has ended or has not begun.
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
    if not abs(expires_s) <= _LONGEST_S:
        fix = "write expires_s=3600 (`--expires 3600`)"
        raise ConfigError("expires_s", expires_s, f"seconds, at most {_LONGEST_S:,}", fix)
    chosen = next(iter(checked.roles.values())).ranks
    now_ns = time.time_ns()
    layout = RunLayout(configure.current().save_path if save_path is None else save_path)
    listening = read_listening(layout)
    if steps != "next" and last is None:
        _check_not_begun(checked.steps, steps, layout, listening)
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
            layout, listening, own=save_path is None, next_run=next_run, of_the_past=last is not None
        ),
    )
    for name, text in (("steps", request.steps), ("roles", roles), ("tool", tool)):
        if text is not None and not 0 < len(text) <= MAX_TEXT:
            raise ConfigError(name, text, f"1 to {MAX_TEXT} characters", "shorten it, or omit it")
    change_requests(layout, lambda standing: [*_living(standing), request])
    return request.id


def _check_not_begun(
    ranges: Sequence[StepRange], asked: str, layout: RunLayout, listening: Sequence[Listening]
) -> None:
    """Raise ConfigError if every process that listens in the folder has begun or passed all these steps. A
    process that has begun no step yet can still capture any step.
    """
    begun = {(process.host, process.pid): process.step for process in listening if not has_ended(process)}
    if _listener is not None and listens_here(os.fspath(layout.root)):
        begun |= _listener.last_step()  # the file is written every few seconds only
    known = [step for step in begun.values() if step is not None]
    if not known or len(known) < len(begun) or any(steps.goes_beyond(min(known)) for steps in ranges):
        return
    allowed = f"`next`, or steps after {min(known)}, which the run has begun"
    raise ConfigError("steps", asked, allowed, f"ask for `next`, or for step {min(known) + 1} or a later one")


def _runs_that_listen(
    layout: RunLayout, known: Sequence[Listening], *, own: bool, next_run: bool, of_the_past: bool
) -> list[str] | None:
    """Return the ids of the runs that listen in a folder, or None if the request is for any run.

    Args:
        own: True if the folder belongs to this process' run, which need not listen yet.
        of_the_past: True if past steps are requested, which a later run does not have.

    Raises:
        CaptureError: no run listens, and the request is not for the next run.
    """
    living = [process for process in known if not has_ended(process)]
    if living and all(process.run_id for process in living):
        return sorted({process.run_id for process in living} | ({identity.run_id()} if own else set()))
    if living or own or next_run or listens_here(os.fspath(layout.root)):
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
    """Return the requests that have not expired, or expired less than a day ago. Their answers may still be
    read.
    """
    return [request for request in standing if request.expires_ns > time.time_ns() - _DAY_NS]


_listener: Listener | None = None
"""The listener of this process, or None. One writer: `_listening`."""


def apply(config: ProfileConfig, request: Request, step: int) -> ProfileConfig:
    """Return `config` with the changes of `request`, for the requested step.

    Raises:
        ConfigError: the request has a wrong value.
    """
    changes: dict[str, object] = {"steps": [step]}
    if request.tool is not None:
        changes["tool"] = request.tool
    if request.seconds is not None:
        changes["budget"] = config.budget.replace(seconds=request.seconds)
    ranks = request.ranks
    if request.roles is not None:
        selected = config.role(request.roles) or next(iter(config.roles.items()))
        role = selected[1].replace(ranks=selected[1].ranks if ranks is None else ranks, profiler=True)
        changes["roles"] = {request.roles: role}
    elif ranks is not None:
        changes["roles"] = {name: role.replace(ranks=ranks) for name, role in config.roles.items()}
    return config.replace(**changes)


class Listener:
    """Poller of one run's `control.json`, and writer of this process' answers."""

    def __init__(self, config: ProfileConfig, process: ProcessInfo) -> None:
        self.save_path = config.save_path
        self._layout = RunLayout(config.save_path)
        self._control = os.fspath(self._layout.control)
        self._step: int | None = None
        """The last step that began, or None."""
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt a check
        self._seen: tuple[int, int] | None = None
        """Modification time and inode of the file at the last check, or None if there was no file."""
        self._requests: list[Request] = []
        self._claimed: dict[str, int] = {}
        self._answers: dict[str, Answer] = {}
        """{request id: answer}. The dict is replaced and not changed, because a signal handler may read it at
        any time."""
        self._itself = Listening(
            host=process.host,
            pid=process.pid,
            role=process.role,
            rank=process.rank,
            since_ns=time.time_ns(),
            step=None,
            imported_ns=identity.IMPORTED_NS,
            world_size=process.world_size,
            selects=f"{','.join(map(str, config.steps))} {config.record}",
        )
        self._written: Listening | None = None
        self._is_silent = not config.names_folder and not config.steps
        """True if neither a folder nor a step was configured; then nothing is written before a request."""
        self._stop = threading.Event()
        self._poll_s = config.control.poll_seconds
        threading.Thread(target=self._poll, name="stepscope-requests", daemon=True).start()

    def wanted(self, config: ProfileConfig, step: int, *, alone: bool) -> ProfileConfig | None:
        """Return the configuration for `step` if a request selects it, else None.

        Args:
            alone: True if only this process decides which step is `next`. If other ranks open their own
                captures, they read the request during their next step, so `next` is the step after that.
        """
        self._step = step
        if self._nothing_asked():
            return None
        with self._lock:
            self._look()
            if shutdown.take():
                return config.replace(steps=[step])
            for request in self._requests:
                chosen = self._decide(config, request, step, alone)
                if chosen is not None:
                    return chosen
        return None

    def amend(self, step: int, **fields: object) -> None:
        """Replace fields of the answers whose last step is `step`."""
        with self._lock:
            self._answers = {
                name: msgspec.structs.replace(answer, **fields) if step in answer.steps[-1:] else answer
                for name, answer in self._answers.items()
            }

    def write_last(self, why: str) -> None:
        """Write final answers, as if no further step begins. If the process survives SIGTERM, the answers may
        change.
        """
        with self._lock:
            self._look()
            answers = {
                request.id: answer_by_now(request, self._answers[request.id], gone=why)
                for request in self._requests
            }
            if self._layout.root.is_dir():
                self._write(answers, ended_ns=time.time_ns())

    def last_step(self) -> dict[tuple[str, int], int | None]:
        """Return {(host, pid) of this process: the last step that began, or None}."""
        return {(self._itself.host, self._itself.pid): self._step}

    def close(self) -> None:
        self._stop.set()

    def _nothing_asked(self) -> bool:
        """Return whether there is no request by a signal or a file, now or at the last check. This takes no
        lock.
        """
        if self._requests or self._seen is not None or shutdown.pending():
            return False
        return not os.access(self._control, os.F_OK)

    def _decide(
        self, config: ProfileConfig, request: Request, step: int, alone: bool
    ) -> ProfileConfig | None:
        answer = self._answers.get(request.id)
        if request.last is not None or answer is None or answer.state not in ("heard", "captured"):
            return None
        try:
            if not self._is_for(request, step, alone):
                return None
            chosen = apply(config, request, step)
            check_tool(chosen)
        except ours(ConfigError, OSError) as error:
            self._answer(request, Answer(state="refused", reason=str(error)))
            return None
        steps = [*answer.steps, step]
        self._answer(request, Answer(state="captured", steps=steps, reason=answer.reason))
        return chosen

    def _is_for(self, request: Request, step: int, alone: bool) -> bool:
        """Return whether `request` is for `step`. If all steps of the request are in the past, answer that
        the request was missed or has expired.
        """
        answer = self._answers[request.id]
        if step in answer.steps:
            return False
        if request.steps == "next":
            if request.id not in self._claimed:
                if time.time_ns() > request.expires_ns:
                    return self._miss(request, "it had expired when a step began", "expired")
                proposed = step if alone else step + 1
                self._claimed[request.id] = claim_step(self._layout, request.id, proposed)
            claimed = self._claimed[request.id]
            ranges: tuple[StepRange, ...] = (StepRange(claimed, claimed + 1),)
        else:
            ranges = _ranges(request.steps)
        if any(step in steps for steps in ranges):
            return time.time_ns() <= request.expires_ns or bool(answer.steps)
        over = not any(steps.goes_beyond(step) for steps in ranges)
        if over and not answer.steps:
            return self._miss(request, f"step {step} was reached when it was heard")
        return False

    def _miss(self, request: Request, reason: str, state: AnswerState = "missed") -> bool:
        self._answer(request, Answer(state=state, reason=reason))
        return False

    def _poll(self) -> None:
        pause_s = self._poll_s if self._itself.rank is None else 0  # 0, as other ranks may soon need the file
        while not self._stop.wait(pause_s):
            pause_s = self._poll_s
            try:
                with self._lock:
                    if not self._stop.is_set():
                        self._look()
                        self._write()
            except ours() as error:  # a full disk may have room at the next check
                failures.note("polling for requests", error)
        if _listener is not self:
            _write_last(self, "its process went on in another run's folder")

    def _look(self) -> None:
        """Read `control.json` if it has changed, and answer new requests. An invalid file does not raise."""
        seen = _stamp(self._control)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            known = read_requests(self._layout.control)
            self._requests = [
                request for request in known if request.runs is None or identity.run_id() in request.runs
            ]
        except RecordError as error:
            failures.warn("stepscope: requests are ignored until this is fixed: %s", error)
            self._requests = []
        for request in self._requests:
            if request.id not in self._answers:
                self._answer(request, _first_answer(request))
        asked = {request.id for request in self._requests}
        self._answers = {name: answer for name, answer in self._answers.items() if name in asked}

    def _answer(self, request: Request, answer: Answer) -> None:
        self._answers = {**self._answers, request.id: answer}

    def _write(self, last: dict[str, Answer] | None = None, ended_ns: int | None = None) -> None:
        """Write the answers to the file that also shows that the run listens. Create the run's folder if
        needed. The polling thread calls this, so that the beginning of a step does not wait for the disk.
        """
        answers = self._answers if last is None else last
        if self._is_silent and not answers:
            return
        record = msgspec.structs.replace(
            self._itself,
            step=self._step,
            run_id=identity.run_id(),
            answers=answers,
            ended_ns=ended_ns,
            failed=ended_ns is not None and _has_failed(),
        )
        if record != self._written:
            write_listening(self._layout, record)
            self._written = record


def _has_failed() -> bool:
    """Return whether an exception that nothing caught ends this process. A Ctrl-C is no failure, and an
    interactive process goes on after its errors.
    """
    return isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1")


def _first_answer(request: Request) -> Answer:
    """Return the answer to a new request. If it is for past steps, write these steps now."""
    if time.time_ns() > request.expires_ns:
        return Answer(state="expired", reason="it had expired")
    if request.last is None:
        return Answer(state="heard")
    recorder = slot.recorder
    if recorder is None:
        return Answer(
            state="refused",
            reason="this run keeps no steps. Fix: no record: off in its configuration",
        )
    steps = recorder.write_last(request.last)
    if not steps:
        return Answer(state="refused", reason="no step is in memory that is not written yet")
    few = None if len(steps) == request.last else "no further step is in memory that is not written yet"
    return Answer(state="captured", steps=steps, reason=few)


def wanted(
    config: ProfileConfig, step: int, role: str, rank: int | None, *, alone: bool
) -> ProfileConfig | None:
    """Call `Listener.wanted` of this process' listener. Never raise."""
    if switch.DISABLED or not config.control.requests:
        return None
    try:
        return _listening(config, role, rank).wanted(config, step, alone=alone or is_alone())
    except ours() as error:
        failures.note("looking for requests", error)
        return None


def _listening(config: ProfileConfig, role: str, rank: int | None) -> Listener:
    """Return the listener for `config.save_path`. A listener for another folder is closed."""
    global _listener
    standing = _listener
    if standing is None or standing.save_path != config.save_path:
        if standing is not None:
            standing.close()
        standing = _listener = Listener(config, identify(role, rank=rank))
        shutdown.handle(config)
    return standing


def listens_here(save_path: str) -> bool:
    """Return whether this process listens for requests in the folder `save_path`."""
    return _listener is not None and _listener.save_path == save_path


def tell_others(step: int, others: dict[str, str]) -> None:
    """Record the answers of workers and replicas to the capture of a requested step."""
    if _listener is not None:
        _listener.amend(step, others=others)


def tell_outcome(step: int, reason: str | None) -> None:
    """Record the outcome of a requested capture.

    Args:
        reason: Reason why the capture failed or is empty. None records nothing.
    """
    if _listener is not None and reason is not None:
        _listener.amend(step, reason=f"step {step}: {reason}")


def end(why: str) -> None:
    """Write final answers to open requests at the end of the process."""
    if _listener is not None:
        _write_last(_listener, f"{why} before such a step began")


def _end_at_exit() -> None:
    if _listener is not None:
        _listener.close()  # else the next poll would overwrite the final answers
    end("the process exited")


def _write_last(listener: Listener, why: str) -> None:
    try:
        listener.write_last(why)
    except ours() as error:
        failures.note("writing the last answers", error)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except ours(OSError):
        return None
    return status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=MAX_REQUESTS)
def _ranges(steps: str) -> tuple[StepRange, ...]:
    """Return the steps of a request. Cached, because requests are checked in every step."""
    return ProfileConfig.from_mapping({"steps": steps}).steps


def _forget() -> None:
    global _listener
    _listener = None  # a forked child does not have the polling thread


fork.forgets("request listener", _forget)
shutdown.on_exit("on-demand requests", lambda ending, _: end(ending.error), order=30)
atexit.register(_end_at_exit)
