"""One engine's captures, in order: each begins, ends once, and leaves its own files and no other's.

Life of a capture: begun -> ending -> ended, or given up, which is ending without files. Everything happens on
the work loop, so a caller that is gone changes nothing: what it started is stopped, and the files of a
stop that took too long still come to their folder, with their sidecars.

One file above 400 lines: beginning, ending, late files and publishing share the state of one capture.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stepscope.engines import EngineCapture, EngineProfilerBase, refuse_second_start
from stepscope.engines.artifacts import Option, publish, read_anchor
from stepscope.errors import EngineError, StepscopeError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.late import take_in, waiting
from stepscope.files.manifest.parts import read_parts
from stepscope.files.manifest.records import IDLE, ProcessPart
from stepscope.files.sidecar import Artifact
from stepscope.files.storage.processes import is_running
from stepscope_vllm import _versions
from stepscope_vllm._capture.outcome import Outcome, is_idle
from stepscope_vllm._driving import ascend_profiler, work_loop
from stepscope_vllm._driving.facts import between, steady
from stepscope_vllm._driving.in_process import Started
from stepscope_vllm._files import ranks, traces
from stepscope_vllm._files.ranks import Layout

_entering = threading.Lock()
"""Servers of one process look side by side; a part of a manifest is read, changed and written."""


class Target(Protocol):
    """Recorded engine: one of this process, or one behind HTTP."""

    @property
    def version(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """Folder that the engine writes to; None if unknown."""
        ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the engine was built with; empty where they are not known."""
        ...

    @property
    def told(self) -> Sequence[Mapping[str, Any]]:
        """Its workers' answers after the latest stop (`WorkerExtension.stepscope_release`)."""
        ...

    def facts(self) -> dict[str, Option]:
        """May block."""
        ...

    async def start(self, capture: EngineCapture, name: str, ranks: list[int] | None) -> Started: ...

    async def stop(self) -> dict[str, str]:
        """Stop the recording; return {part that failed: reason}."""
        ...


class Desk:
    """The captures of one engine. Outlives the profilers that are made for it, one for each capture."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: Run | None = None
        """The running capture. Taken and given back by callers of any thread, under `lock`."""
        self.owed: Run | None = None
        """The latest capture that got no files: those that come late are its."""
        self._turn: asyncio.Lock | None = None

    @property
    def turn(self) -> asyncio.Lock:
        """Held on the line while an engine is told something: first come, first served."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn

    def take(self, run: Run) -> None:
        """Reserve the engine for a run. Raises EngineError while another has it."""
        with self.lock:
            refuse_second_start(None if self.current is None else self.current.capture)
            self.current = run

    def give_back(self) -> Run | None:
        with self.lock:
            run, self.current = self.current, None
            return run


class Run:
    """One capture of one engine."""

    def __init__(self, desk: Desk, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        self.capture = capture
        self.ignored = ignored
        self._desk = desk
        self._target = target
        self._name = traces.prefix_of(capture.name)
        self._given_up = False
        self._started: Started | None = None
        self._seen: tuple[set[str], set[str]] = (set(), set())
        """Files in the engine's folder before the start, and after it."""
        self._opened: ClockAnchor | None = None
        self._facts: dict[str, Option] = {}
        self._truncated: str | None = None
        self._asked_ns = 0
        """Time of our stop; unix ns."""
        self._early = False
        """A trace was there before our stop."""
        self._changed: Mapping[str, int] = {}
        """Times at which its files were whole, where the engine wrote them."""
        self._ending: Future[list[Artifact]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.over = threading.Event()
        """Set once ending it has begun, by whomever."""

    @property
    def folder(self) -> Path | None:
        """Return the folder that its engine writes to by default."""
        return self._target.folder

    async def begin(self) -> None:
        async with self._desk.turn:
            if self._given_up:
                return
            before = await asyncio.to_thread(self._look)
            self._facts = await asyncio.to_thread(self._target.facts)
            self._started = await self._target.start(self.capture, self._name, self._local_ranks())
            self._opened = read_anchor()
            self._seen = before, await asyncio.to_thread(traces.listed, self._started.folder)
            if self.capture.seconds is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.capture.seconds, self._out_of_time)

    def give_up(self) -> None:
        """Whoever asked for it is gone: what began is stopped, and its files are removed."""
        self._given_up = True
        work_loop.submit(self._undo())

    def end(self) -> Future[list[Artifact]]:
        """Its files, once they are whole. The same for everyone who asks."""
        with self._desk.lock:
            if self._ending is None:
                self._ending = work_loop.submit(self._end())
                self.over.set()
            return self._ending

    def _out_of_time(self) -> None:
        self._truncated = f"open for more than {self.capture.seconds:g} s"
        self.end()

    async def _undo(self) -> None:
        async with self._desk.turn:
            if self._started is None:
                return
            with contextlib.suppress(EngineError):  # the engine is dead, and nobody asks any more
                await self._stop_target()
            await asyncio.to_thread(self._remove)

    async def _end(self) -> list[Artifact]:
        async with self._desk.turn:
            if self._timer is not None:
                self._timer.cancel()
            self._desk.owed, late_for = self, self._desk.owed
            self._early = await asyncio.to_thread(self._ended_early)
            self._asked_ns = time.time_ns()
            self.ignored |= await self._stop_target()
            closed = read_anchor()
            facts = await asyncio.to_thread(self._target.facts)
            found = await asyncio.to_thread(self._collect, late_for, closed, facts)
            self._desk.owed = None
            return found

    async def _stop_target(self) -> dict[str, str]:
        said = await self._target.stop()
        if self._started is not None and not self._started.aimed and self._target.folder is not None:
            # Of several folders, only the files show which is the engine's.
            self._started = self._started._replace(folder=self._target.folder)
        return said

    # On a thread: disks block.

    def _look(self) -> set[str]:
        """Return the names of files before the start, the files of this step's earlier captures among it."""
        folder = self._target.folder
        if folder is not None:
            self._bring_home(folder)
        return traces.listed(folder) | traces.listed(Path(self.capture.out_dir))

    def _bring_home(self, folder: Path) -> None:
        """Move files of captures that are over, and enters them: whoever made those was gone when the files
        came.
        """
        run = RunLayout(Path(self.capture.step_dir).parent)
        names = {name for name in traces.listed(folder) if not traces.is_recording(name)}
        named = {name: step for name in names if (step := traces.step_of(name)) is not None}
        for step in sorted(set(named.values())):
            layout = run.step(step)
            for run_id in _over(read_parts(layout)[0]):
                stem = f"step_{step:06d}_{run_id}{self._of_replica()}"
                mine = {name for name in named if name.startswith(f"{traces.prefix_of(stem)}_")}
                whole = {
                    name for name in mine if not (traces.is_trace(name) and traces.unfinished(folder / name))
                }
                if not whole:
                    continue
                capture = msgspec.structs.replace(
                    self.capture,
                    step=step,
                    run_id=run_id,
                    name=stem,
                    out_dir=str(layout.engine_dir(self.capture.replica)),
                    step_dir=str(layout.root),
                    ranks=None,
                )
                replica = (run_id, f"replica {self.capture.replica}")
                with _entering, contextlib.suppress(OSError, StepscopeError):  # they stay there otherwise
                    Run(self._desk, self._target, capture, {})._adopt(whole, folder)
                    late = [each for each in waiting(layout) if (each.run_id, each.name) == replica]
                    take_in(layout, [each for each in late if each.alive is False])

    def _of_replica(self) -> str:
        """Return the end of its name that tells it from other servers' captures; empty where it has none."""
        found = re.search(r"_replica\d+$", self.capture.name)
        return found[0] if found else ""

    def _collect(self, late_for: Run | None, closed: ClockAnchor, facts: dict[str, Option]) -> list[Artifact]:
        started = self._started
        if started is None:
            raise EngineError("the capture did not begin")
        if started.by_others:
            return []
        names = self._names(started, late_for)
        if not any(map(traces.is_trace, names)) and is_idle(self._target.told):
            self.ignored[IDLE] = "the engine ran no iteration during the capture"
            return []
        paths = [started.folder / name for name in names if traces.is_trace(name)]
        if not paths:
            raise EngineError(
                f"vLLM reported success and wrote no trace to {started.folder}: its workers only log what "
                "goes wrong. Fix: look for 'Failed to stop profiler' in their logs; is there space, and is "
                "this folder seen by them and by this process?"
            )
        try:
            traces.wait_until_complete(paths)
        except ValueError as error:
            raise EngineError(f"{error}; its worker stopped writing") from error
        target = Path(self.capture.out_dir)
        self._changed = traces.changed_ns(started.folder, names)
        if not started.aimed:
            moved = traces.move(names, started.folder, target, self._name)
            paths = [path for path in moved if traces.is_trace(path.name)]
        elif self._target.folder is not None:  # that of the AsyncLLM itself, which nobody can aim
            own = traces.of_frontends(self._target.folder) - self._seen[0]
            traces.wait_until_complete(self._target.folder / name for name in own)
            paths += traces.move(own, self._target.folder, target, self._name)
        return self._publish([traces.read(path) for path in paths], closed, facts)

    def _ended_early(self) -> bool:
        started = self._started
        if started is None or not (started.aimed or started.named):
            return False  # nothing tells its files from those that are late
        before, _ = self._seen
        new = traces.listed(started.folder) - before
        return any(traces.is_trace(name) and name.startswith(f"{self._name}_") for name in new)

    def _names(self, started: Started, late_for: Run | None) -> set[str]:
        """Return the names of this capture's files; late ones of the capture before go where they belong."""
        there, (before, after) = traces.listed(started.folder), self._seen
        named = {name for name in there - before if name.startswith(f"{self._name}_")}
        if started.aimed:
            return named
        if started.named and not any(map(traces.is_recording, there)):
            return named
        # What came while the profiler was starting is the last of the capture before, if that lacks files:
        # a worker does one thing after another. Otherwise it is ours, from a worker that is through already.
        between = after - before if late_for is not None else set()
        if late_for is not None and between:
            late_for._adopt(between, started.folder)
        return there - before - between

    def _adopt(self, names: set[str], folder: Path) -> None:
        """Publish files that came after this capture's end had given them up."""
        moved = traces.move(names, folder, Path(self.capture.out_dir), self._name)
        self._publish([traces.read(path) for path in moved if traces.is_trace(path.name)], None, {})

    def _publish(
        self, written: list[traces.Trace], closed: ClockAnchor | None, facts: dict[str, Option]
    ) -> list[Artifact]:
        layout = self._target.layout
        placed = [(trace, ranks.global_rank(trace, layout, self.capture.replica)) for trace in written]
        odd = (ranks.contradiction(trace, layout) for trace in written)
        if why := next(filter(None, odd), None):
            self.ignored["ranks"] = why
        wanted = self.capture.ranks
        aside = [(t, r) for t, r in placed if wanted is not None and r is not None and r not in wanted]
        for trace, _ in aside:
            traces.remove(trace.path)
        kept = [pair for pair in placed if pair not in aside]
        recorded = {
            trace.path: ascend_profiler.of_recording(trace.path) for trace, _ in kept if trace.is_recording
        }
        for one in filter(None, recorded.values()):  # nothing else says that a server is vllm-ascend's
            self.ignored = {**one.unable(self.capture), **self.ignored}
        options: dict[str, Option] = {
            **steady(facts),
            **between(self._facts, facts),
        }
        left = self._left_aside({rank for _, rank in aside}, layout)
        if left:
            options["left_aside"] = ", ".join(f"rank {rank}" for rank in left)
        workers = sum(not trace.frontend for trace in written)
        complete = layout is None or layout.external or workers >= self._expected(layout)
        if not complete and layout is not None:
            self.ignored["workers"] = f"{workers} of {self._expected(layout)} workers left a trace"
        outcome = self._outcome(facts)
        endings = {trace.path: outcome.ending(trace) for trace, _ in kept}
        return [
            publish(
                trace.path,
                self.capture,
                kind=_kind(trace),
                tool="vllm",
                rank=rank,
                world_size=None if layout is None else layout.size,
                topology=ranks.topology(trace, layout),
                pid=trace.pid,
                host=trace.host,
                truncated=endings[trace.path].truncated,
                ignored=self.ignored,
                opened=self._opened,
                closed=closed,
                versions={"vllm": self._target.version},
                options={**options, **ascend_profiler.options_of(recorded.get(trace.path))},
                stalls=() if trace.frontend else outcome.stalls(trace, self._changed),
                iterations=outcome.iterations(trace),
                iterations_asked=None if trace.frontend else outcome.asked,
                ended=endings[trace.path].ended,
                note=endings[trace.path].note,
            )
            for trace, rank in kept
        ]

    def _outcome(self, facts: Mapping[str, Option]) -> Outcome:
        target, started = self._target, self._started
        built = {**target.settings, **self.capture.extra}
        scheduled = any(built.get(name) for name in ("wait_iterations", "warmup_iterations"))
        return Outcome(
            start=self.capture.iterations.start,
            asked=None if "iterations" in self.ignored else self.capture.iterations.count,
            named=_versions.names_iterations(target.version),
            told=target.told,
            before=self._facts,
            after=facts,
            stopped_ns=None if started is None else self._asked_ns or None,
            early=self._early,
            expired=self._truncated,
            certain=started is not None and (started.aimed or started.named) and not scheduled,
        )

    def _left_aside(self, removed: set[int], layout: Layout | None) -> list[int]:
        """Global ranks of this engine that nobody asked for, whether they wrote a file or not."""
        wanted = self.capture.ranks
        if wanted is None or layout is None or layout.external:
            return sorted(removed)
        return sorted(removed | ranks.unwanted(wanted, layout, self.capture.replica))

    def _expected(self, layout: Layout) -> int:
        """Workers that write: with our extension, those of ranks that nobody wants do not."""
        local = self._local_ranks()
        if self._started is None or not self._started.aimed or local is None:
            return layout.size
        return len(local) * layout.dp

    def _remove(self) -> None:
        started = self._started
        if started is not None:
            for name in self._names(started, None):
                traces.remove(started.folder / name)

    def _local_ranks(self) -> list[int] | None:
        return ranks.local_ranks(self.capture.ranks, self._target.layout, self.capture.replica)


def _kind(trace: traces.Trace) -> str:
    if trace.is_recording:
        return "npu_recording"  # as stepscope-npu names its own
    return "vllm_frontend_trace" if trace.frontend else "vllm_trace"


def _over(parts: Sequence[ProcessPart]) -> set[str]:
    """Return the runs whose one capture of the step is over. Where several processes opened one, each with
    a replica 0, nothing in a file's name says whose it is: it stays where it lies.
    """
    owners: dict[str, list[ProcessPart]] = {}
    for part in parts:
        if part.owner:
            owners.setdefault(part.run_id, []).append(part)
    return {
        run_id
        for run_id, mine in owners.items()
        if len({part.process.key for part in mine}) == 1 and all(map(_has_ended, mine))
    }


def _has_ended(part: ProcessPart) -> bool:
    here = part.process.host == socket.gethostname()
    return part.closed is not None or (here and not is_running(part.process.pid))


class DeskProfiler(EngineProfilerBase):
    """A profiler whose captures are those of one desk."""

    def __init__(self, replica: int | None, desk: Desk) -> None:
        super().__init__(replica)
        self._desk = desk

    async def stop(self) -> list[Artifact]:
        """Return the files of the running capture. Cancelled, they still come, later."""
        run = self._desk.give_back()
        if run is None:
            return []
        artifacts = await work_loop.outcome(run.end())
        self._ignored = run.ignored
        return artifacts

    async def _begin(self, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        """Return when every worker has begun. Cancelled or failed, it leaves nothing running."""
        self._ignored = ignored
        run = Run(self._desk, target, capture, ignored)
        self._desk.take(run)
        try:
            await work_loop.outcome(work_loop.submit(run.begin()))
        except BaseException as error:
            self._desk.give_back()
            run.give_up()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(
                    f"the profiler of vLLM did not start: {type(error).__name__}: {error}"
                ) from error
            raise
