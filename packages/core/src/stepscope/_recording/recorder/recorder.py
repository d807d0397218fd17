"""The flight recorder of this process, which keeps the spans of the last steps and writes them upon a
trigger.

This file has more than 500 lines, because the methods on the training thread, on the thread that looks for
orders and on the recorder's thread share one state.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope._recording.counters.catalogue import openers
from stepscope._recording.counters.sampler import Sampler
from stepscope._recording.process import failures, identity
from stepscope._recording.process.manifest_part import find_peers
from stepscope._recording.process.work_queue import WorkQueue
from stepscope._recording.recorder import nccl_ras, steps
from stepscope._recording.recorder.engine_queues import EngineQueues
from stepscope._recording.recorder.ring import Ring
from stepscope._recording.recorder.state import communicators_in_time, in_time, state_of
from stepscope._recording.recorder.steps import RecordedStep, Steps, StepTokens
from stepscope._recording.recorder.write import (
    COUNTERS_HZ,
    StepWriter,
    Window,
    Written,
    window_of,
    windows_by_time,
)
from stepscope._recording.spans import collective_calls, slot
from stepscope._recording.spans.span import mark, mark_consumed
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files import clock
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending
from stepscope.files.manifest_parts import part_files
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import STEP_TOKENS
from stepscope.files.states import ProcessState, RayCall
from stepscope.files.steps import Order, OrderedStep, StepLine
from stepscope.files.storage import create_once, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


MOST = 1000
"""Largest number of calls in a query of Ray."""
_TIMEOUT_S = 2
_ACTOR = slice(16, None)
"""The part of a task's id that is the id of its actor (Ray's `id.h`)."""
_NO_ACTOR = "f" * 24
"""First digits of the actor id of a task that does not run in an actor: the driver's task, or a plain
task."""


def known_here(workers: bool) -> bool:
    """Return whether this process should query Ray for the calls of all actors. Return True if the process is
    the driver or has workers, and is connected to Ray.
    """
    ray = identity.connected()
    if ray is None:
        return False
    return workers or getattr(ray.get_runtime_context().worker, "mode", None) == ray.SCRIPT_MODE


def open_calls() -> tuple[RayCall, ...]:
    """Return the unfinished calls of this job's actors, the oldest first.

    Raises:
        Exception: Ray has no dashboard, or the dashboard does not answer.
    """
    context = sys.modules["ray"].get_runtime_context()
    state: Any = import_module("ray.util.state")
    tasks = state.list_tasks(
        address=context.gcs_address,
        filters=[
            ("job_id", "=", context.get_job_id()),
            ("type", "=", "ACTOR_TASK"),
            ("state", "!=", "FINISHED"),
            ("state", "!=", "FAILED"),
        ],
        limit=MOST,
        timeout=_TIMEOUT_S,
        detail=True,
        raise_on_missing_output=False,
    )
    return tuple(sorted(_calls(tasks), key=lambda call: -call.age_ns))


def _calls(tasks: list[Any]) -> Iterator[RayCall]:
    now_ms = time.time() * 1000
    for task in tasks:
        caller = task.parent_task_id[_ACTOR]
        since_ms = task.start_time_ms or task.creation_time_ms or now_ms
        yield RayCall(
            caller=None if caller.startswith(_NO_ACTOR) else caller,
            actor=task.actor_id or "",
            method=task.func_or_class_name,
            state=task.state,
            age_ns=max(0, round((now_ms - since_ms) * 1e6)),
            pid=task.worker_pid,
        )


_IN_MEMORY = (
    "stepscope: step %d fired the trigger %s (%s), and stays in memory: `save_path` is not set. "
    "Fix: set it, to have such steps written; or record: off"
)
_LOOK_S = 0.2
_RAY_S = 1.0
"""Longest wait for Ray's answer, including the import of Ray's state API."""
_ORDER_S = 2.0
"""Longest time that a terminated worker waits for an order. Both sides poll twice a second."""
_DYING_S = 1.5
"""Longest wait for the workers' parts in a process that is terminated. It is short, because Ray ends the
workers too."""
_WORKERS_S = 5.0
"""Longest wait for the workers' parts of the manifest, beyond their polling interval."""


class Recorder:
    """The flight recorder of this process.

    The process that runs the training loop calls `begin_step` and `end_step`, and decides which steps are
    written. The decision reaches the other processes as an order: a file in the run's folder. A worker
    has no step numbers and writes its spans within the times in the order.
    """

    calls_attrs = False

    def __init__(self, config: ProfileConfig, process: ProcessInfo, run_id: str, *, owner: bool) -> None:
        """
        Args:
            owner: True for the process that runs the training loop.
        """
        self.config = config
        self.process = process
        self.run_id = run_id
        self.layout = RunLayout(config.save_path)
        self.log = Ring(
            process=process,
            run_id=run_id,
            memory_mb=config.recorder.memory_mb,
            redact=config.redact,
        )
        self.sampler: Sampler | None = None
        """The sampler of counters, or None if counters are off."""
        self.engines: EngineQueues | None = None
        if config.counters.hz:
            self.sampler = Sampler(openers(self.log, str(self.layout.root.absolute()), owner=owner))
            self.engines = EngineQueues(self.sampler, config)
            self.engines.watch()
        self.workers: dict[str, str] = {}
        """{`ProcessInfo.key`: name} of the workers in which a flight recorder was started."""
        self.is_told_of = False
        """True once this recorder begins to start the workers' recorders and to sample the engines."""
        self.clocks: list[ClockOffset] = []
        """Measured clock offsets of workers on other hosts."""
        self.measure: Callable[[], Iterable[ClockOffset]] | None = None
        """Function that measures `clocks` again for workers that answer soon, or None before the first
        measurement."""
        self.steps = Steps(config.recorder.keep_steps)
        self.tokens = StepTokens()
        self._fired: Counter[str] = Counter()
        """{trigger: number of its writes}."""
        self._work: WorkQueue[Callable[[], None]] = WorkQueue("stepscope-recorder", _do, inline=True)
        self._taking = threading.RLock()  # reentrant, because a signal handler may call fire()
        self._has_obeyed = False
        """True once an order has arrived since `ask_for_order` began."""
        self.is_hurried = False
        """True if the process is ending and must not wait long for other processes."""

    def sample(self) -> None:
        """Start sampling counters."""
        if self.sampler is not None:
            try:
                self.sampler.start(COUNTERS_HZ)
            except ours(RuntimeError) as error:  # no more threads
                failures.note("sampling counters for the flight recorder", error)

    def stop(self) -> None:
        """Stop sampling. The spans and the thread are released once everything is written."""
        if self.sampler is not None:
            self.sampler.end()
        self._work.put(self.log.close)
        self._work.end()

    # Methods that the recorded code calls, besides `log.new` and `log.begin`.

    @property
    def step(self) -> int | None:
        return self.log.step

    def consume(self, trajectory: str, begun: int | None, policy_version: int | None) -> None:
        """See `ActiveSession`."""
        mark_consumed(self.log, trajectory, begun, policy_version)

    def count_tokens(self, counts: Mapping[str, int]) -> None:
        """See `ActiveSession`. Tokens between two steps are not counted."""
        mark(self.log, STEP_TOKENS, dict(counts))
        if self.steps.running is not None:
            self.tokens.add(counts)

    def note_tokens(self, counts: Mapping[str, int]) -> None:
        """See `FlightRecorder`."""
        self.tokens.add(counts)

    def advance(self) -> None:
        """See `ActiveSession`. Do nothing, because no profiler is running."""

    # Methods that the training loop calls.

    def begin_step(self, number: int) -> RecordedStep:
        """Begin a step that is not captured."""
        collective_calls.watch(self.config.collectives)
        self.log.begin_step(number)
        return self.steps.begin(number, self.log.last_id)

    def end_step(self, step: RecordedStep, ending: Ending | None, *, failed: bool) -> str | None:
        """End a step. Return the trigger that has fired, or None.

        Args:
            failed: False if the step ended normally, or by a Ctrl-C, which is not a failure of the step.
        """
        self.steps.end(step, ending)
        step.tokens = self.tokens.take()
        if self.process.rank in (None, 0):
            self._work.put(partial(self._write_line, step, self.steps.oldest_ns))
        if ending is not None and failed:
            return self.fire("exception", ending.error)
        slow = self.steps.slowness(step, self.config.recorder.slow_factor, self._stages_of)
        return None if slow is None else self.fire("slow", slow)

    def captured(
        self,
        number: int,
        opened: ClockAnchor,
        closed: ClockAnchor,
        error: str | None,
        top_ns: Mapping[tuple[str, str], int],
    ) -> None:
        """Queue the line of a captured step, to be written to the run's folder. Nothing is queued on ranks
        above 0, or if no folder is configured.

        Args:
            top_ns: {(role, stage): duration of the top-level spans in ns}.
        """
        tokens = self.tokens.take()
        if self.process.rank in (None, 0) and self.config.names_folder:
            line = StepLine(
                step=number,
                start_ns=opened.wall_ns,
                dur_ns=closed.mono_ns - opened.mono_ns,
                stages=steps.seconds_of(top_ns),
                tokens=tokens,
                captured=True,
                error=error,
            )
            self._work.put(partial(steps.append, self.layout.step_lines(self.run_id), line))

    def fire(self, trigger: str, reason: str) -> str | None:
        """Write the last steps in the background and return the trigger.

        Return None if nothing is written, because the trigger is off or has reached its limit, all steps are
        written already, or no folder is configured. The last case is logged.
        """
        with self._taking:
            settings = self.config.recorder
            steps = [step for step in self.steps.last(settings.last) if not step.is_written]
            is_allowed = trigger in settings.triggers and self._fired[trigger] < settings.per_trigger
            if not steps or not is_allowed:
                return None
            self._fired[trigger] += 1
            if not self.config.names_folder:
                failures.warn(_IN_MEMORY, steps[-1].number, trigger, reason)
                return None
            taken = self._take(steps)
        rank = self.process.rank
        of = "" if rank is None else f" of {self.process.role} rank {rank}"
        self._order(taken, trigger, f"step {taken[-1].number}{of}: {reason}")
        return trigger

    def write_last(self, number: int) -> list[int]:
        """Write the last `number` ended steps in the background. Return the numbers of the steps that were
        not written before.
        """
        taken = self._take(self.steps.last(number, ended=True))
        if taken:
            self._order(taken, "request", "somebody asked for it")
        return [step.number for step in taken]

    def _take(self, steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """Return the steps that are not written yet, and mark them as written. The caller must write them."""
        with self._taking:
            taken = [step for step in steps if not step.is_written]
            for step in taken:
                step.is_written = True
            return taken

    def _order(self, steps: Sequence[RecordedStep], trigger: str, reason: str) -> None:
        now = clock.read_anchor()
        windows = [window_of(step, now) for step in steps]
        order = Order(
            run_id=self.run_id,
            trigger=trigger,
            reason=reason,
            made_ns=time.time_ns(),
            steps=tuple(
                OrderedStep(step=window.step, start_ns=window.opened.wall_ns, end_ns=window.closed.wall_ns)
                for window in windows
            ),
        )
        self._work.put(partial(self._give_and_obey, order, windows))

    def obey(self, order: Order) -> None:
        """Write the steps that another process has ordered, in the background."""
        self._work.put(partial(self._obey, order))
        self._has_obeyed = True

    def serve(self, order: Order) -> None:
        """Order all processes to write the last steps, as requested by a worker that is being terminated. Do
        nothing between two steps.
        """
        if self.steps.running is not None:
            self.fire(order.trigger, order.reason)

    def ask_for_order(self, reason: str) -> None:
        """Ask the process that runs the training loop for an order to write the last steps, and wait for this
        order.

        A worker calls this if it is terminated during a call, because a worker has no step numbers.
        """
        if "signal" not in self.config.recorder.triggers or not self.config.names_folder:
            return
        if not self.log.open_spans():
            return
        order = Order(
            run_id=self.run_id,
            trigger="signal",
            reason=f"{self.process.key}: {reason}",
            made_ns=time.time_ns(),
            steps=(),
        )
        self._has_obeyed = False  # first, because the answer may come at once
        try:
            write_atomic(self.layout.order(self.run_id, os.urandom(4).hex()), msgspec.json.encode(order))
        except ours(OSError) as error:
            failures.note("asking for an order of the flight recorder", error)
            return
        until = time.monotonic() + _ORDER_S
        while not self._has_obeyed and time.monotonic() < until:
            time.sleep(_LOOK_S / 4)

    def state(self) -> ProcessState:
        """Return the current state of this process."""
        running, session = self.steps.running, slot.session()
        others = () if session is None else session.log.open_spans()
        return state_of(
            self.process,
            self.run_id,
            [*others, *self.log.open_spans()],
            step=self.log.step if session is None else session.step,
            step_age_ns=None if running is None else running.dur_ns,
            workers=dict(self.workers),
            sampler=self.sampler,
        )

    def write_state(self, order_id: str) -> None:
        """Write the current state of this process, on the calling thread.

        Raises:
            OSError: The file cannot be written.
        """
        state, path = self.state(), self.layout.state_of(self.process, order_id)
        asks_ray, asks_nccl = known_here(bool(self.workers)), nccl_ras.may_know()
        write_atomic(path, msgspec.json.encode(msgspec.structs.replace(state, more=asks_ray or asks_nccl)))
        if asks_ray or asks_nccl:
            until = time.monotonic() + nccl_ras.ANSWER_S
            found = communicators_in_time() if asks_nccl else ()
            left_s = min(_RAY_S, until - time.monotonic())
            calls = in_time("asking Ray for calls", open_calls, left_s) if asks_ray and left_s > 0 else None
            if path.exists():  # `stepscope why` removes the file when its wait ends
                full = msgspec.structs.replace(state, ray_calls=calls or (), communicators=found)
                write_atomic(path, msgspec.json.encode(full))

    def later(self, work: Callable[[], None]) -> None:
        """Queue work for the recorder's thread, after everything that was triggered before."""
        self._work.put(work)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written, or for `timeout_s`. Return whether everything is written."""
        self.is_hurried = True
        return not self._work.drain(timeout_s)

    # Methods that run on the recorder's thread.

    def _write_line(self, step: RecordedStep, oldest_ns: int) -> None:
        """Write the line of a step, if `save_path` is set. Drop spans that ended before `oldest_ns`, the
        start of the oldest step that was kept when the step ended.

        The steps that are kept now are not used here, because an order in the queue may still need the spans
        of older steps.
        """
        stages = self._stages_of(step)
        if self.config.names_folder:
            line = steps.line_of(step, stages, self.sampler)
            steps.append(self.layout.step_lines(self.run_id), line)
        self.log.drop_before(oldest_ns)

    def _stages_of(self, step: RecordedStep) -> dict[str, float]:
        """Return {`role/stage`: seconds} of an ended step, which are computed once."""
        if step.stages is None:
            step.stages = steps.stages_of(step, self.log.since(step.after))
        return step.stages

    def _give_and_obey(self, order: Order, windows: Sequence[Window]) -> None:
        identity.record_run(self.config)
        if self.measure is not None and self.clocks and not self.is_hurried:
            self.clocks += self.measure()
        offsets = {clock.process: clock.offset_ns for clock in self.clocks}
        order = msgspec.structs.replace(order, offsets_ns=offsets)
        try:
            path = self.layout.order(self.run_id, os.urandom(4).hex())
            write_atomic(path, msgspec.json.format(msgspec.json.encode(order)))
        except ours(OSError) as error:
            failures.warn("stepscope: the flight recorder's order to the workers is lost: %s", error)
        writer = self.writer(order.run_id, order)
        written = writer.write(windows, owner=True, began=self.workers, clocks=self.clocks)
        # Each rank that runs the training loop writes its part. Only the first rank logs the step, and looks
        # for ranks of other hosts.
        alone = self.process.rank is None
        since_ns = identity.IMPORTED_NS
        first = [step for step in written if alone or create_once(step.layout.logged(self.run_id), since_ns)]
        self._add_peers(written, order, first)
        self._fold(written, _DYING_S if order.trigger == "signal" else 0.0)
        for step in first:
            if step.part.state("spans") == "failed":  # a warning was logged
                continue
            failures.tell(
                "stepscope: step %d is on record (%s: %s): stepscope report %s",
                step.part.record.step,
                order.trigger,
                order.reason,
                step.layout.root,
            )

    def _obey(self, order: Order) -> None:
        now = clock.read_anchor()
        known = {step.number: step for step in self.steps.last(self.config.recorder.keep_steps)}
        if not known:
            self.writer(order.run_id, order).write(windows_by_time(order, self.process, now), owner=False)
            return
        own = self._take([known[step.step] for step in order.steps if step.step in known])
        windows = [window_of(step, now) for step in own]
        written = self.writer(order.run_id, order).write(windows, owner=True, began=self.workers)
        self._add_peers(written, order, ())

    def _add_peers(self, written: Sequence[Written], order: Order, first: Sequence[Written]) -> None:
        """Add the other ranks to the parts of steps. In the steps `first`, ranks of all hosts are added."""
        if self.process.rank is None:
            return
        peers = {  # a thousand ranks have a thousand files, which are read once for all steps
            all_hosts: find_peers(self.layout, self.process, order.run_id, all_hosts=all_hosts)
            for all_hosts in {step in first for step in written}
        }
        for step in written:
            in_step = step.part.record.step == order.steps[-1].step
            step.part.add_peers(peers[step in first], in_step=in_step)
            step.part.write()

    def writer(self, run_id: str, order: Order | None = None) -> StepWriter:
        """Return a writer for the steps of `order`, or without an order, for a step that another process
        captures.
        """
        return StepWriter(self.log, self.sampler, self.config, run_id, order, self.state, self.engines)

    def _fold(self, written: Sequence[Written], hurried_s: float) -> None:
        """Wait for the workers' parts, then write the manifests.

        Args:
            hurried_s: Longest wait if this process is ending.
        """
        began = time.monotonic()
        until = began + 2 * self.config.control.poll_seconds + _WORKERS_S
        while self.workers and time.monotonic() < (began + hurried_s if self.is_hurried else until):
            if all(self._is_whole(step) for step in written):
                break
            time.sleep(_LOOK_S)
        for step in written:
            step.part.fold(step.layout)

    def _is_whole(self, step: Written) -> bool:
        parts = part_files(step.layout, as_written=True)[0].values()
        whole = {
            part.process.key for part in parts if not any(item.state == "pending" for item in part.expected)
        }
        return self.workers.keys() <= whole


def _do(work: Callable[[], None]) -> None:
    try:
        work()
    except ours() as error:
        failures.note("writing from the flight recorder", error)
