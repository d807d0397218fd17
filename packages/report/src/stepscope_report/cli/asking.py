"""The question of `why` to all processes of a run, and their answers.

This module imports little, so that a run is asked before the command line is read: its processes answer while
the command's modules are imported, which takes a fifth of a second of CPU.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stepscope.files.layout import RunLayout
from stepscope.files.requests import Listening, has_died, has_ended, is_of_attempt, read_listening
from stepscope.files.states import ProcessState
from stepscope.files.steps import WHY, Order
from stepscope.files.storage import read_records, write_atomic
from stepscope_report.why import ENDED

POLL_S = 0.05
_QUIET_S = 1.0
"""Seconds after the last answer from which no further answer is expected."""
_LOOKS_S = 0.7
"""Seconds within which every process has seen the question. Answers are awaited for at least this time."""


class Question:
    """An order to every process of a run to write its state."""

    def __init__(self, layout: RunLayout) -> None:
        order = Order(run_id="", trigger=WHY, reason="stepscope why", made_ns=time.time_ns(), steps=())
        self.layout = layout
        self._order = layout.order(WHY, os.urandom(4).hex())
        self._folder = layout.states(self._order.stem)
        self._read: dict[Path, ProcessState] = {}
        self._began = time.monotonic()
        write_atomic(self._order, msgspec.json.encode(order))

    def answers(self, wait_s: float) -> list[ProcessState]:
        """Return the states of all processes that answer within `wait_s`. Return early if every expected
        process has answered, or if no further answer came for `_QUIET_S`.
        """
        answered, last, until = 0, self._began, time.monotonic() + wait_s
        while True:
            states = self._states()
            now = time.monotonic()
            if len(states) > answered:
                answered, last = len(states), now
            is_quiet = bool(states) and now > last + _QUIET_S and not any(state.more for state in states)
            is_over = now > self._began + _LOOKS_S and (is_quiet or _is_all(states))
            if is_over or now > until:
                return states
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove the order and the answers."""
        self._order.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _states(self) -> list[ProcessState]:
        for path in self._folder.glob("[!.]*.json"):
            known = self._read.get(path)
            if known is None or known.more:
                for state in read_records([path], ProcessState):
                    self._read[path] = state
        return [self._read[path] for path in sorted(self._read)]


@contextmanager
def asked_early(words: Sequence[str]) -> Iterator[Question | None]:
    """Ask the run that the command line `why RUN` names, if one word names a folder. Yield the question, or
    None.

    Args:
        words: The command line. Only simple forms are recognised, because the module that parses command
            lines is not imported.
    """
    folders = [word for word in words[1:] if not word.startswith("-") and os.path.isdir(word)]
    if words[:1] != ["why"] or len(folders) != 1 or {"-h", "--help"} & {*words}:
        yield None
        return
    try:
        question = Question(RunLayout(folders[0]))
    except OSError:  # the command asks again, and reports the error
        yield None
        return
    try:
        yield question
    finally:
        question.close()


def fates(states: Sequence[ProcessState]) -> dict[str, str]:
    """Return {key: reason} for workers of this host that did not answer because they ended or are stopped."""
    known = {state.process.key for state in states}
    workers = {key for state in states for key in state.workers} - known
    found = {}
    for key in workers:
        place, _, pid = key.rpartition("_pid")
        if place.endswith(f"_{os.uname().nodename}"):
            fate = _fate(int(pid))
            if fate:
                found[key] = fate
    return found


def dead_owners(layout: RunLayout, states: Sequence[ProcessState]) -> dict[str, str]:
    """Return {key: name} of the processes that opened captures and died in the runs that answered. Processes
    of an earlier attempt, and processes that another process replaced, are left out.

    A process that answered has not died, even if its pid is unknown here, as in another container.
    """
    runs, answered = {state.run_id for state in states}, {state.process.key for state in states}
    known = [one for one in read_listening(layout) if one.run_id in runs]
    alive = [one for one in known if not has_ended(one)]
    last = {(one.run_id, one.role, one.rank): one for one in sorted(known, key=lambda one: one.since_ns)}
    dead = [one for one in last.values() if has_died(one) and all(_is_beside(one, own) for own in alive)]
    names = {one.process.key: one.role if one.rank is None else f"{one.role} {one.rank}" for one in dead}
    return {key: name for key, name in names.items() if key not in answered}


def _is_beside(one: Listening, own: Listening) -> bool:
    """Return False if a process belongs to an earlier attempt than `own`, maybe with more or fewer ranks."""
    is_of_job = one.role != own.role or one.world_size == own.world_size
    return is_of_job and is_of_attempt(one, own)


def _fate(pid: int) -> str | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return f"{ENDED} (pid {pid})" if Path("/proc/self/stat").exists() else None
    return {"T": "its process is stopped (SIGSTOP)", "Z": f"{ENDED} (pid {pid})"}.get(status)


def _is_all(states: Sequence[ProcessState]) -> bool:
    """Return whether every worker and every rank that the states mention has answered or has ended."""
    known = {state.process.key for state in states} | fates(states).keys()
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    worlds: dict[tuple[str, str], int] = defaultdict(int)
    for state in states:
        job, rank = (state.run_id, state.process.role), state.process.rank
        if rank is not None:
            ranks[job].add(rank)
            worlds[job] = max(worlds[job], state.process.world_size or 0)
    return (
        bool(known)
        and all(known >= state.workers.keys() and not state.more for state in states)
        and all(ranks[job].issuperset(range(size)) for job, size in worlds.items())
    )
