"""Spans of this process for a step that another process captures.

This process is not a worker of the capture, but for example a child of a process pool or a tool server. Its
flight recorder keeps all spans. Spans below an attached carrier of the step are written into the step's
folder. They are written again when further spans below the carrier have ended, at most every `_PAUSE_S`
seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from socket import gethostname

import msgspec

from stepscope._recording.process import fork, identity
from stepscope._recording.recorder import standing
from stepscope._recording.recorder.recorder import Recorder
from stepscope._recording.recorder.write import Window
from stepscope._recording.spans import collective_calls, scopes
from stepscope._recording.spans.carrier import Attached
from stepscope._recording.spans.scopes import Scope
from stepscope._recording.spans.span import Span
from stepscope.config import ProfileConfig
from stepscope.files import clock
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import StepLayout
from stepscope.files.sidecar import ProcessInfo

_PAUSE_S = 0.2
"""Shortest time between two writes of one visit."""
_LOOK_S = 0.02
_EXIT_S = 5.0
"""Longest wait for the last write at the end of a child of `multiprocessing`."""
_MOST = 64
"""Largest number of steps in `_visits`. Late spans of older steps are not written."""
ROLE = "worker"
"""Role of a process that records only because a carrier was attached."""

_visits: dict[tuple[str, int], StepVisit | None] = {}
"""{(run, step): visit, or None if the step is not captured or this process is part of its capture}. Writers:
`visit`, and `_forget` in a forked child."""
_lock = threading.RLock()  # reentrant, because a signal handler may attach a carrier


class StepVisit:
    """The spans of this process for one step that another process captures."""

    def __init__(self, recorder: Recorder, run_id: str, step: int) -> None:
        self._recorder = recorder
        self._run_id = run_id
        self._step = step
        self._opened = clock.read_anchor()
        caller = _span_of(scopes.current.get())  # the span of the method that attaches the carrier
        self._after = recorder.log.last_id if caller is None else caller.id - 1
        """Number of the last span before the visit."""
        if caller is not None:
            self._opened = _earlier(self._opened, caller.start_ns)
        self._is_queued = False
        self._written_at = 0.0

    def left(self) -> None:
        """See `slot.Visit`."""
        if not self._is_queued:
            self._is_queued = True
            self._recorder.later(self._write)

    def _write(self) -> None:
        """Write this process' part of the step. Runs on the recorder's thread."""
        until = self._written_at + _PAUSE_S
        while time.monotonic() < until and not self._recorder.is_hurried:
            time.sleep(_LOOK_S)
        self._is_queued = False  # first, so that spans that end from now on cause a new write
        window = Window(self._step, self._opened, clock.read_anchor())
        self._recorder.writer(self._run_id).write_visit(window, self._includes)
        self._written_at = time.monotonic()

    def _includes(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans of this visit among all spans of the recorder."""
        return [span for span in spans if span.id > self._after and self._is_below(span)]

    def _is_below(self, span: Span) -> bool:
        scope: Scope | None = span
        while scope is not None:
            if isinstance(scope, Attached) and scope.visit is self:
                return True
            if isinstance(scope, Span) and scope.caller is not None:
                link = scope.caller.link
                return (scope.caller.step if link is None else link.step) == self._step
            scope = scope.parent
        return False


def visit(config: ProfileConfig, caller: str, run_id: str, step: int) -> StepVisit | None:
    """Return the visit of this process for a step, or None if nothing is recorded here for the step. The
    flight recorder is started if needed. See `slot.Visitor` for the other arguments.

    Args:
        config: Configuration of this process. If `save_path` is not set, nothing is recorded.
    """
    key = run_id, step
    with _lock:
        if key in _visits:
            return _visits[key]
        recorder = _recorder(config, run_id)
        found = None
        if recorder is not None and _is_captured(recorder.layout.step(step), caller, run_id):
            found = StepVisit(recorder, run_id, step)
        while len(_visits) >= _MOST:
            del _visits[next(iter(_visits))]
        _visits[key] = found
        return found


def _recorder(config: ProfileConfig, run_id: str) -> Recorder | None:
    if config.record == "off" or not config.names_folder:
        return None
    recorder = standing.standing()
    if recorder is None:
        rank, size = identity.torch_rank() or (None, None)  # RANK may be the variable of a rank's child
        process = ProcessInfo(
            role=ROLE,
            rank=rank,
            world_size=size,
            rank_source=None if rank is None else "torch.distributed",
            host=gethostname(),
            pid=os.getpid(),
        )
        recorder = standing.start(config, process, run_id)
        collective_calls.watch(config.collectives)  # the recorder's own thread looks after seconds
        _write_at_the_end_of_a_child(recorder)
    return recorder


def _is_captured(layout: StepLayout, caller: str, run_id: str) -> bool:
    """Return whether the process that made the carrier takes part in a capture of the step, and this process
    does not.
    """
    own = f"{gethostname()}_pid{os.getpid()}"
    return layout.has_part_of(caller, run_id) and not layout.has_part_of(own, run_id)


def _span_of(scope: Scope | None) -> Span | None:
    """Return the span of the method that attached the carrier `scope`, or None."""
    above = None if scope is None else scope.parent
    return above if isinstance(above, Span) and above.caller is not None else None


def _earlier(anchor: ClockAnchor, mono_ns: int) -> ClockAnchor:
    """Return the clock reading at the earlier time `mono_ns`, computed from `anchor`."""
    wall_ns = anchor.wall_ns - anchor.mono_ns + mono_ns
    return msgspec.structs.replace(anchor, wall_ns=wall_ns, mono_ns=mono_ns, raw_ns=None)


def _write_at_the_end_of_a_child(recorder: Recorder) -> None:
    """Make a child of `multiprocessing` wait for all writes before it ends.

    Before Python 3.13, a forked child calls no `atexit` functions.
    """
    if identity.is_child():
        sys.modules["multiprocessing.util"].Finalize(None, recorder.drain, (_EXIT_S,), exitpriority=1)


def _forget() -> None:
    global _lock
    _visits.clear()
    _lock = threading.RLock()


fork.forgets("visits", _forget)
