"""Spans as they are recorded: live objects in memory, lines on disk a moment later.

A span appends itself to its log when it opens: that is all the recorded code waits for. A thread looks five
times a second. What has closed by then becomes a `span` line; what is still open gets an `open` line, and is
looked at again until it closes. So a hang is visible, and a crash loses at most the last fifth of a second.

One file above 400 lines: the log and its spans share their hot paths.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_native_id
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING, TypedDict

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import spans as lines
from stepscope.files.clock import ClockAnchor
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import SpanLink
from stepscope.files.storage.atomic import private
from stepscope.files.values import MAX_TEXT, AttrValue, bounded, settled, settled_value
from stepscope.recording.process import clock, failures
from stepscope.recording.spans import redaction, scopes, slot
from stepscope.recording.spans.scopes import OFF, Place, Scope, current
from stepscope.recording.spans.wrapping import INLINED, Declared

if TYPE_CHECKING:
    from io import FileIO
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from stepscope.recording.session.profiler_windows import Windows


FLUSH_S = 0.2
FLUSH_NS = 10_000_000
"""A flush stops after this long, so that a burst of spans is written after it and not during it: at most 5 %
of the GIL.
"""
_encode = msgspec.json.Encoder().encode


class _Thread(threading.local):
    """The native id of the running thread: asking the kernel for it each time would cost 0.2 us of a 1.0 us
    span.
    """

    def __init__(self) -> None:
        self.id = get_native_id()


_thread = _Thread()
# Looked up once: a span that goes through `current` for each of them takes a twentieth longer.
_current, _enter, _leave = current.get, current.set, current.reset


class Span(Scope):
    """One recorded stretch of code. Made by `SpanLog.new` and entered; or by `begin`, which enters it too.

    Without `__init__`: Python's way to one takes a quarter of what a whole span does.
    """

    __slots__ = (
        "attrs", "end_ns", "error", "id", "log", "origin", "parent", "role", "said", "stage", "start_ns",
        "thread", "token",
    )  # fmt: skip

    log: SpanLog
    stage: str
    role: str | None
    attrs: Mapping[str, AttrValue] | None
    thread: int
    id: int
    start_ns: int
    end_ns: int | None
    error: str | None

    def __enter__(self) -> Self:
        if self.token is not None or self.end_ns is not None:
            return self._again()
        log = self.log
        self.thread = _thread.id
        self.parent = _current()
        self.token = _enter(self)
        self.id = next(log.ids)
        self.start_ns = monotonic_ns()
        log.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = monotonic_ns()
        # As Scope.__exit__, spelled out: a call is a tenth of a span.
        token, self.token = self.token, None
        try:
            _leave(token)  # type: ignore[arg-type]  # None and SHARED raise TypeError
        except ValueError:
            pass
        except TypeError:
            self.token = token
            self._end_again(kind, error, trace)
            return
        if error is not None:
            try:
                self.error = describe(error)
            except RecursionError:  # at the limit of the user's recursion: there is no depth to call it
                self.error = type(error).__name__
        self.end_ns = end_ns  # last: the writing thread takes a span with an end as complete

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.error = describe(error)
        self.end_ns = monotonic_ns()

    def _copy(self) -> Scope:
        session = slot.active  # of this capture, or of a later one
        return super()._copy() if session is None else session.log.new(self.stage, self.role, self.attrs)

    def set(self, **attrs: AttrValue) -> None:
        """Adds attributes; later values win."""
        copy = None if self.end_ns is None else self._entered()
        if copy is not None and copy is not self:
            copy.set(**attrs)
            return
        new = settled(attrs)
        self.attrs = {**self.attrs, **new} if self.attrs else new

    def add(
        self,
        stage: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str | None = None,
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> None:
        span = PlacedSpan(self.log, stage, role, attrs)
        span.parent, span.token = self, None
        span.thread = _thread.id
        span.id = next(self.log.ids)
        span.start_ns, span.end_ns = start_ns, max(start_ns, end_ns)
        self.log.opened(span)

    def reference(self) -> SpanLink:
        return SpanLink(process=self.log.process.key, span=self.id, step=self.log.step)

    def awaits_place(self, process: str) -> bool:
        if self.parent is not None or self.token is None or self.log.process.key.endswith(process):
            return False
        if (
            self.thread != _thread.id
            or self.log._stop.is_set()
            or (self.step, self.trajectory) != (None, None)
        ):
            return False
        here = _current()
        try:
            _leave(self.token)  # only the task that entered it can: in a copy of its context this raises
        except ValueError:
            return False
        self.token = _enter(here)
        return True


class PlacedSpan(Span):
    """A span that says more of its place than its role: a trajectory, a turn, another step's work."""

    __slots__ = ("policy_version", "step", "trajectory", "turn")

    def __init__(
        self,
        log: SpanLog,
        stage: str,
        role: str | None,
        attrs: Mapping[str, AttrValue] | None,
        *,
        step: int | None = None,
        policy_version: int | None = None,
        trajectory: str | None = None,
        turn: int | None = None,
    ) -> None:
        self.log = log
        self.stage = stage
        self.role = role
        self.attrs = attrs
        self.said = self.end_ns = self.error = self.token = None
        self.step = step
        self.policy_version = policy_version
        self.trajectory = trajectory
        self.turn = turn

    def _copy(self) -> Scope:
        session = slot.active
        place = Placing(
            step=self.step,
            policy_version=self.policy_version,
            trajectory=self.trajectory,
            turn=self.turn,
        )
        if session is None:
            return Place(**place)
        return session.placed_span(self.stage, self.role, self.attrs, **place)


class Placing(TypedDict, total=False):
    step: int | None
    policy_version: int | None
    trajectory: str | None
    turn: int | None


def mark(log: SpanLog, stage: str, attrs: Mapping[str, AttrValue] | None, **place: Unpack[Placing]) -> None:
    """A span without length, below the one that runs."""
    now_ns = monotonic_ns()
    record(log, stage, attrs, now_ns, now_ns, **place)


def record(
    log: SpanLog,
    stage: str,
    attrs: Mapping[str, AttrValue] | None,
    start_ns: int,
    end_ns: int,
    **place: Unpack[Placing],
) -> None:
    """A span that is over, below the one that runs."""
    span = PlacedSpan(log, stage, None, attrs, **place)
    span.parent, span.token = _current(), None
    span.thread = _thread.id
    span.id = next(log.ids)
    span.start_ns, span.end_ns = start_ns, end_ns
    log.opened(span)


def describe(error: BaseException) -> str:
    """`ExceptionType: message`, whatever the exception's own __str__ does: at most 200 characters, or 2000 of
    stepscope's own, which end with the fix.
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[: 2000 if isinstance(error, StepscopeError) else 200]


class SpanLog:
    """The span file of one process for one capture, and the thread that writes it."""

    def __init__(
        self,
        path: Path,
        *,
        process: ProcessInfo,
        step: int,
        run_id: str,
        limit: int,
        redact: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.process = process
        self.step = step
        self.limit = limit
        self.redact = redact
        self.ids = itertools.count(1)
        self.roles: set[str] = set()
        """Of all spans so far. One writer: who writes their lines."""
        self.written = 0
        self.dropped = 0
        self.failed: str | None = None
        """Why the file is not whole; None while it is."""
        self._pending: deque[Span] = deque()
        self.opened = self._pending.append
        """Called by a span when it opens. deque.append is atomic and never blocks."""
        self.windows: Windows | None = None
        """The profiler's, where one records this process: its trace shows the spans too."""
        self._running: list[Span] = []
        """Spans whose `open` line is written and whose end is waited for. The writing thread's own."""
        self._run_id = run_id
        self._file: FileIO | None = None
        self._fd = -1
        """Of the file, while it is open."""
        self._size = 0
        self._anchor: ClockAnchor | None = None
        """When recording began; None until then."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._writing = threading.RLock()  # of a close() that was interrupted a second one gets hold

    def new(self, stage: str, role: str | None = None, attrs: Mapping[str, AttrValue] | None = None) -> Span:
        """A span to enter, once."""
        if self.windows is not None:
            return self.windows.new(self, stage, role, attrs)
        span = Span()
        span.log = self
        span.stage = stage
        span.role = role
        span.attrs = attrs
        span.said = span.end_ns = span.error = span.token = None
        return span

    def begin(
        self,
        declared: Declared,
        attrs: Mapping[str, AttrValue] | None,
        resumption: int | None = None,
        first: bool = True,
    ) -> Scope:
        """The span, entered, of a call of a decorated function; in discrete mode, its window.

        `new` and `__enter__` spelled out, and what keeps our failures away from the user's code: one frame
        for all of it. OFF when that failed: the call then goes on untimed.

        Args:
            resumption: Which one of the generator it is; None for a call.
            first: Whether the capture sees this call or generator for the first time.
        """
        try:
            if resumption is not None:
                attrs = {**(attrs or {}), "resumption": resumption}
            if self.windows is not None:
                return self.windows.begin(self, declared, attrs, first)
            span = Span()
            span.log = self
            span.stage = declared.stage
            span.role = declared.role
            span.attrs = attrs
            span.said = span.end_ns = span.error = None
            span.thread = _thread.id
            span.parent = _current()
            span.token = _enter(span)
            span.id = next(self.ids)
            span.start_ns = monotonic_ns()
            self.opened(span)
            return span
        except RecursionError:
            return OFF  # near the limit of the user's recursion: the depth that is left is for the call
        except Exception as failure:
            failures.note(f"opening the span {declared.stage}", failure)
            return OFF

    def open(self) -> None:
        """Creates the file and starts the thread, which writes nothing before `start`; not once it is closed.

        Raises:
            OSError: the file cannot be created.
        """
        if self._stop.is_set():  # by a signal's handler
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # An object: what an interrupt keeps from being assigned is closed with it.
            self._file = open(self.path, "xb", buffering=0, opener=private)  # noqa: SIM115  # until close()
            self._fd = self._file.fileno()
        except OSError as error:
            self.failed = describe(error)
            raise
        finally:  # without a file too: the thread counts what is lost, and it does not pile up in memory
            self._thread = threading.Thread(target=self._run, name="stepscope-spans", daemon=True)
            self._thread.start()

    def start(self, anchor: ClockAnchor) -> None:
        """Begins recording at `anchor`. Waits for no disk: the thread writes the header."""
        self._anchor = anchor

    @property
    def began(self) -> bool:
        """Whether the file has its header."""
        return self._size > 0

    def close(self, anchor: ClockAnchor, timeout_s: float = 5.0) -> None:
        """Writes what is pending and the end line. Spans still open keep their `open` line. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            with suppress(RuntimeError):  # interrupted in its start: it ends as soon as it begins
                self._thread.join(timeout_s)
        if not self._writing.acquire(timeout=timeout_s):
            self.failed = f"the disk did not take the last spans within {timeout_s:g} s"
            return
        self._anchor = self._anchor or anchor
        try:
            self._write_pending()
            if self._fd >= 0 and self.began:
                end = lines.End(anchor=anchor, spans=self.written, dropped=self.dropped)
                self._append(_encode(end) + b"\n")
                self.failed = self.failed or self._lost()
        except OSError as error:
            self.failed = describe(error)
            failures.note("writing the end of the spans", error)
        except BaseException:  # a Ctrl-C: a second call writes the end
            self.failed = self.failed or "interrupted while the last spans were written"
            raise
        finally:
            self._writing.release()
        self._fd = -1
        if self._file is not None:
            self._file.close()

    def _lost(self) -> str | None:
        """Why nobody will find what was written; None when it lies where it should."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return None
        except OSError:
            pass
        return "the file was removed or replaced while it was written"

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            with self._writing:
                self._write_pending(monotonic_ns() + FLUSH_NS)

    def _write_pending(self, until_ns: int | None = None) -> None:
        if self._anchor is None:
            return
        running, self._running = self._running, []
        for span in running:
            (self._running if span.end_ns is None else self._pending).append(span)
        finished, batch = 0, [] if self.began or self._fd < 0 else [self._header(self._anchor)]
        for at in range(len(self._pending)):
            if until_ns is not None and at % 64 == 0 and monotonic_ns() > until_ns:
                break
            span = self._pending.popleft()
            end_ns = span.end_ns
            if end_ns is None:
                self._running.append(span)
            over = end_ns is not None
            if span.id > self.limit:
                self.dropped += over
                continue
            try:
                batch.append(_encoded(span, end_ns))
            except Exception as error:  # one span is lost, and not all that come after it
                self.dropped += over
                failures.note("encoding a span", error)
                continue
            finished += over
        if not batch:
            return
        if self._fd < 0:  # it could not be opened: that was said
            self.dropped += finished
            return
        try:
            self._append(b"".join(batch))
            self.written += finished
        except OSError as error:
            self.dropped += finished
            self.failed = self.failed or describe(error)
            failures.note("writing spans", error)

    def _header(self, anchor: ClockAnchor) -> bytes:
        header = lines.Header(step=self.step, run_id=self._run_id, process=self.process, anchor=anchor)
        return _encode(header) + b"\n"

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            # Disk full: no half line stays behind, so that what was written before remains readable.
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += len(data)


def _begin_in_compiled_code(
    self: SpanLog,
    declared: Declared,
    attrs: Mapping[str, AttrValue] | None,
    resumption: int | None = None,
    first: bool = True,
) -> Scope:
    return OFF


# A span cannot be part of a graph: tracing one would break the graph, and raise under fullgraph=True in the
# middle of a run.
setattr(SpanLog.begin, INLINED, _begin_in_compiled_code)


def _encoded(span: Span, end_ns: int | None) -> bytes:
    try:
        return _encode(_line(span, end_ns)) + b"\n"
    except Exception:
        # What a span says is the user's: an int beyond 64 bits, a lone surrogate, a role that is no text. The
        # span is kept, and they are shown as text.
        span.attrs = {_ascii(key): _ascii(settled_value(value)) for key, value in (span.attrs or {}).items()}
        span.stage = _ascii(span.stage)
        span.role = None if span.role is None else _ascii(span.role)
        return _encode(_line(span, end_ns)) + b"\n"


def _ascii(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text)[1:-1][:MAX_TEXT]


def _line(span: Span, end_ns: int | None) -> lines.Open | lines.Span:
    """The span's line: an `open` one while it runs, a `span` one when it is over."""
    log, said = span.log, scopes.inherited(span)
    parent, link = _above(span)
    step = None if said.step == log.step else said.step
    role, stage = bounded(str(said.role or log.process.role)), bounded(str(span.stage))
    trajectory = said.trajectory if said.trajectory is None else bounded(said.trajectory)
    log.roles.add(role)
    attrs = redaction.written(span.attrs, log.redact) if span.attrs else None
    # Two calls, spelled out: building the second from the first would double the cost of a line.
    if end_ns is None:
        return lines.Open(
            span=span.id,
            parent=parent,
            link=link,
            role=role,
            stage=stage,
            start_ns=span.start_ns,
            step=step,
            policy_version=said.policy_version,
            trajectory=trajectory,
            turn=said.turn,
            thread=span.thread,
            attrs=attrs,
        )
    return lines.Span(
        span=span.id,
        parent=parent,
        link=link,
        role=role,
        stage=stage,
        start_ns=span.start_ns,
        step=step,
        policy_version=said.policy_version,
        trajectory=trajectory,
        turn=said.turn,
        thread=span.thread,
        attrs=attrs,
        dur_ns=end_ns - span.start_ns,
        error=redaction.error_of(span.error, log.redact),
    )


def _above(span: Span) -> tuple[int | None, SpanLink | None]:
    """(parent id in this file, or the link to a span elsewhere)."""
    scope = span.parent
    while scope is not None:
        if isinstance(scope, Span) and scope.log is span.log:
            return scope.id, None
        link = scope.reference()
        if link is not None:
            return None, link
        scope = scope.parent
    return None, None


_cost_ns: int | None = None
"""What one span costs here, measured once per process. One writer: `span_cost_ns`."""


def span_cost_ns(batches: int = 5, repeats: int = 50) -> int:
    """CPU ns that one span takes here, the writing thread's work included: the best of a few batches."""
    global _cost_ns
    if _cost_ns is None:
        process = ProcessInfo(role="calibration", rank=None, world_size=None, host="", pid=0)
        log = SpanLog(Path(os.devnull), process=process, step=0, run_id="", limit=batches * repeats)
        log._fd = os.open(os.devnull, os.O_WRONLY)
        log.start(clock.read_anchor())
        _cost_ns = min(_batch_ns(log, repeats) for _ in range(batches)) // repeats
        os.close(log._fd)
    return _cost_ns


def _batch_ns(log: SpanLog, repeats: int) -> int:
    began = thread_time_ns()
    for _ in range(repeats):
        with log.new("calibration"):
            pass
    log._write_pending()
    return thread_time_ns() - began
