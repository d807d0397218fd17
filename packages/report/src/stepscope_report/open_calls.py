"""Open calls of one process, by what runs them, and open calls of Ray's actors, by their callers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from stepscope.files.states import Frame, OpenSpan, ProcessState, RayCall, Task
from stepscope_report.waiting import Wait, is_polling, wait_of

_RUNNING = "RUNNING"
_MOST = 8
"""Largest number of calls of one actor that are listed."""


class Process:
    """The state of one process, with its spans, tasks and threads by number."""

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        self.key = state.process.key
        self.spans = {span.span: span for span in state.spans}
        self.tasks = {task.id: task for task in state.tasks}
        self.threads = {thread.id: thread for thread in state.threads}
        self.below: dict[int, list[int]] = defaultdict(list)
        """{span: its direct children}."""
        self.tasks_of: dict[int | None, list[Task]] = defaultdict(list)
        for span in state.spans:
            if span.parent is not None:
                self.below[span.parent].append(span.span)
        for task in state.tasks:
            self.tasks_of[task.span].append(task)

    @cached_property
    def blocked(self) -> dict[int, int | None]:
        """{thread whose event loop is blocked: the span that runs in it, None if no span does}."""
        found: dict[int, int | None] = {}
        for thread in self.state.threads:
            if thread.blocks:
                task = None if thread.task is None else self.tasks.get(thread.task)
                found[thread.id] = None if task is None else task.span
        return found

    def calls(self) -> Iterator[OpenSpan]:
        """Yield the innermost spans, and the spans that block an event loop."""
        holders = set(self.blocked.values())
        yield from (s for s in self.state.spans if s.span not in self.below or s.span in holders)

    def leaves(self, tops: Iterable[int]) -> Iterator[int]:
        """Yield the innermost spans below the spans `tops`."""
        rest = list(tops)
        while rest:
            top = rest.pop()
            if top in self.below:
                rest += self.below[top]
            else:
                yield top

    def frames(self, span: OpenSpan) -> tuple[Sequence[Frame], Wait | None]:
        """Return the stack of a span, and the target of its wait (None if it works).

        The stack is that of the task that runs in the span, else of the span's thread, unless that thread
        only runs an event loop or another task.
        """
        thread = self.threads.get(span.thread)
        tasks = self.tasks_of[span.span]
        running = None if thread is None else thread.task
        if thread is not None and running is not None and any(task.id == running for task in tasks):
            return thread.frames, wait_of(thread.frames)
        if tasks:
            ends = [end for end in self._awaited(tasks) if end.span == span.span or end.span is None]
            # The deepest: the others await it, or what it awaits.
            task = max(ends or tasks, key=lambda task: len(task.frames))
            return task.frames, "ray" if task.awaits == "ObjectRef" else "task"
        if thread is None or is_polling(thread) or running is not None:
            return (), "task"
        return thread.frames, wait_of(thread.frames)

    def _awaited(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks at the end of each chain of waits that begins at `tasks`."""
        rest, seen = list(tasks), set[int]()
        while rest:
            task = rest.pop()
            if task.id not in seen:
                seen.add(task.id)
                below = [self.tasks[number] for number in task.awaited if number in self.tasks]
                rest += below
                if not below:
                    yield task

    def awaited_spans(self, span: OpenSpan) -> set[int]:
        """Return the spans of other calls that the tasks of a span wait for, directly or through other
        tasks.
        """
        spans = {task.span for task in self._awaited(self.tasks_of[span.span])}
        return {number for number in spans if number is not None and number != span.span}

    def line(self, span: int) -> Iterator[int]:
        """Yield a span and the spans above it, up to a span with several children, each of which is a wait of
        its own.
        """
        at: int | None = span
        while at is not None and at in self.spans:
            yield at
            at = self.spans[at].parent
            if at is not None and len(self.below[at]) > 1:
                return


class RayCalls:
    """Open calls by actor. `asker` is the state of the process that queried Ray, usually the driver."""

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self.asker: ProcessState | None = next((state for state in states if state.ray_calls), None)
        calls = () if self.asker is None else self.asker.ray_calls
        self._keys = {state.process.actor_id: state.process.key for state in states if state.process.actor_id}
        self._of: dict[str, list[RayCall]] = defaultdict(list)
        self._called: dict[str | None, set[str]] = defaultdict(set)
        for call in calls:
            self._of[call.actor].append(call)
            if call.caller != call.actor:
                self._called[call.caller].add(call.actor)

    def elsewhere(self) -> dict[str, list[RayCall]]:
        """Return {actor that does not record: the calls that it runs, or its waiting calls if it runs
        none}.
        """
        return {
            actor: ([call for call in calls if call.state == _RUNNING] or calls)[:_MOST]
            for actor, calls in self._of.items()
            if actor not in self._keys
        }

    def called_by(self, process: str) -> set[str]:
        """Return the keys of processes, or ids of actors, whose calls a process waits for.

        Args:
            process: `ProcessInfo.key`, or the id of an actor that does not record.
        """
        own = next((actor for actor, key in self._keys.items() if key == process), process)
        actors = set(self._called.get(own, ()))
        if self.asker is not None and process == self.asker.process.key:
            actors |= self._called.get(None, set())
        return {self._keys.get(actor, actor) for actor in actors} - {process}
