"""Percentages that a report prints, recomputed from the lines in the step's files, instant by instant.

Those of the account, of what ran at the same time, of idle time and of the long tail; not those of engines.
Nothing here comes from `stepscope_report` but what is checked: it reads the files as plain JSON, and
divides time by asking every two microseconds which spans run.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from packages.report.tests import steps
from stepscope_report import step_report
from stepscope_report.timeline import load_step

DATA = Path(__file__).with_name("data")
STEPS = [*sorted(DATA.glob("*/step_*"))]
EVERY_NS = 2_000
Instants = npt.NDArray[np.bool_]
Line = dict[str, Any]


class Process(NamedTuple):
    key: str
    owner: bool
    aligned: bool
    anchors: list[dict[str, int]]
    last_ns: int
    spans: dict[int, Line]

    def wall_ns(self, mono_ns: int) -> float:
        """Along the straight line through its two readings of both clocks."""
        first, last = self.anchors[0], self.anchors[-1]
        pace = (last["wall_ns"] - first["wall_ns"]) / max(last["mono_ns"] - first["mono_ns"], 1)
        since_ns = mono_ns - first["mono_ns"]
        return float(first["wall_ns"] + since_ns * (pace if len(self.anchors) > 1 else 1))


def read(step: Path) -> tuple[list[Process], Line]:
    """(processes, the owner's part)."""
    parts = [json.loads(path.read_text()) for path in step.glob("processes/*.json")]
    (owner,) = (part for part in parts if part["owner"])
    processes = []
    for part in parts:
        info = part["process"]
        rank = "" if info["rank"] is None else f"_rank{info['rank']}"
        key = f"{info['role']}{rank}_{info['host']}_pid{info['pid']}"
        lines = list(_lines(step, info["pid"]))
        spans: dict[int, Line] = {}
        for line in lines:
            if line["kind"] == "span" or (line["kind"] == "open" and line["span"] not in spans):
                spans[line["span"]] = line
        ends = [line["anchor"] for line in lines if line["kind"] == "end"]
        closed = [*ends, *([part["closed"]] if part["closed"] else [])][:1]
        measured = any(clock["process"] == key for clock in owner["clocks"])
        aligned = info["host"] == owner["process"]["host"] or measured
        times = [span["start_ns"] + span.get("dur_ns", 0) for span in spans.values()]
        last_ns = closed[0]["mono_ns"] if closed else max(times)
        anchors = [part["opened"], *closed]
        processes.append(Process(key, part["owner"], aligned, anchors, last_ns, spans))
    return processes, owner


def _lines(step: Path, pid: int) -> Iterator[Line]:
    for path in step.glob(f"spans/*_pid{pid}_*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                assert step.parent.name == "truncated"


class ByHand:
    """The division of one step's window."""

    def __init__(self, step: Path) -> None:
        processes, owner = read(step)
        cost = owner["cost"]
        self.start_ns: int = owner["opened"]["wall_ns"]
        self.window_ns: int = owner["closed"]["wall_ns"] - self.start_ns
        self.capture_ns: int = cost["start_ns"] + cost["stop_ns"]
        self.count = self.window_ns // EVERY_NS
        self.number: int = owner["step"]
        self.trajectories: list[tuple[float, float]] = []
        self.busy: dict[str, Instants] = {}
        """{key of an aligned process: instants at which one of its leaves ran and did not wait}."""
        leaves = self._leaves({process.key: process for process in processes})
        self.shares: dict[tuple[str, str], float] = defaultdict(float)
        self.together: Counter[tuple[tuple[str, str], ...]] = Counter()
        self._divide(leaves)

    def percent(self, ns: float) -> float:
        return float(100 * ns / self.window_ns)

    def _at(self, process: Process, mono_ns: int) -> int:
        return round((process.wall_ns(mono_ns) - self.start_ns) / EVERY_NS)

    def _leaves(self, processes: dict[str, Process]) -> dict[tuple[int, str, str], Instants]:
        """Return the instants at which each (tier, role, stage) had a running span with none below it."""
        extents: dict[tuple[str, int], tuple[int, int]] = {}
        for process in processes.values():
            for number, span in process.spans.items():
                ends_ns = span["start_ns"] + span["dur_ns"] if "dur_ns" in span else process.last_ns
                if process.aligned:
                    extents[process.key, number] = (
                        self._at(process, span["start_ns"]),
                        self._at(process, ends_ns),
                    )
                else:
                    extents[process.key, number] = (0, 0)
                own = span.get("step", self.number) == self.number
                if span["stage"] == "trajectory" and "dur_ns" in span and own and process.aligned:
                    self.trajectories.append((process.wall_ns(span["start_ns"]), process.wall_ns(ends_ns)))
        covered = {place: np.zeros(max(0, end - start), bool) for place, (start, end) in extents.items()}
        for place, (start, end) in extents.items():
            for above in self._above(place, processes):
                from_, _ = extents[above]
                covered[above][max(0, start - from_) : max(0, end - from_)] = True
        leaves: dict[tuple[int, str, str], Instants] = {}
        now: dict[str, Instants] = {}
        """As `busy`, of spans for this step alone."""
        for (key, number), (start, end) in extents.items():
            process, span = processes[key], processes[key].spans[number]
            later = span.get("step", self.number) > self.number
            tier = 4 if span["stage"] in ("queue", "wait") else 2 * later + process.owner
            leaf = leaves.setdefault((tier, span["role"], span["stage"]), np.zeros(self.count, bool))
            low, high = max(0, start), max(0, min(end, self.count))
            if low < high:
                leaf[low:high] |= ~covered[key, number][low - start : high - start]
            if process.aligned:
                for of in (self.busy, now) if tier < 2 else (self.busy,):
                    instants = of.setdefault(key, np.zeros(self.count, bool))
                    if tier < 4 and low < high:
                        instants[low:high] |= ~covered[key, number][low - start : high - start]
        # The owner's own spans count while no worker works; those for this step while none works for it.
        nobody = np.zeros(self.count, bool)
        workers, workers_now = (
            np.any([nobody, *(of[key] for key in of if not processes[key].owner)], axis=0)
            for of in (self.busy, now)
        )
        for key, busy in self.busy.items():
            if processes[key].owner:
                busy &= ~workers
                busy |= now.get(key, False) & ~workers_now
        return leaves

    def _above(self, place: tuple[str, int], processes: dict[str, Process]) -> Iterator[tuple[str, int]]:
        """Yield the ancestors of a span, of any process."""
        while True:
            key, number = place
            span = processes[key].spans[number]
            link = span.get("link")
            if "parent" in span:
                place = (key, span["parent"])
            elif link is not None and link.get("step", self.number) == self.number:
                place = (link["process"], link["span"])
            else:
                return
            if place[0] not in processes or place[1] not in processes[place[0]].spans:
                return
            above = processes[place[0]].spans[place[1]].get("step", self.number)
            if span.get("step", self.number) > self.number >= above:
                return  # a later step's work is no part of this step's
            yield place

    def _divide(self, leaves: dict[tuple[int, str, str], Instants]) -> None:
        """Each instant to the leaves of the lowest tier, in equal parts."""
        free = np.ones(self.count, bool)
        for tier in range(5):
            own = sorted((role, stage) for number, role, stage in leaves if number == tier)
            if not own:
                continue
            running = np.array([leaves[tier, role, stage] & free for role, stage in own])
            codes = (running.astype(np.uint64) << np.arange(len(own), dtype=np.uint64)[:, None]).sum(0)
            for code, count in zip(*np.unique(codes[codes > 0], return_counts=True), strict=True):
                labels = tuple(label for bit, label in enumerate(own) if int(code) >> bit & 1)
                for label in labels:
                    self.shares[label] += int(count) * EVERY_NS / len(labels)
                if len(labels) > 1:
                    self.together[labels] += int(count) * EVERY_NS
            free &= ~running.any(0)
        self.idle_ns = int(free.sum()) * EVERY_NS


def printed(step: Path) -> str:
    return steps.printed(step_report(load_step(step)), 400)


def rows(text: str, title: str) -> list[list[str]]:
    """Return the cells of a printed table, by two blanks or more between them."""
    after = text.split(f"\n{title}", 1)[1].splitlines()[1:]
    start = next(place for place, line in enumerate(after) if "──" in line) + 1
    cells = []
    for line in after[start:]:
        if not line.strip():
            break
        cells.append([cell.strip() for cell in re.split(r"\s{2,}", line.strip())])
    return cells


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.parent.name} {step.name}")
def test_each_printed_percentage_is_what_looking_at_each_instant_gives(step: Path) -> None:
    by_hand, text = ByHand(step), printed(step)
    others = {"unaccounted": by_hand.idle_ns, "step": by_hand.window_ns}
    seen: set[tuple[str, str]] = set()
    compared = 0
    for cells in rows(text, "Where it went"):
        if cells[0] in others:
            assert float(cells[2]) == pytest.approx(by_hand.percent(others[cells[0]]), abs=0.1), cells
            compared += 1
        elif len(cells) == 6:
            role, stage, _, share = cells[0], cells[1].removesuffix(" (outside the engine)"), *cells[2:4]
            seen.add((role, stage))
            assert float(share) == pytest.approx(by_hand.percent(by_hand.shares[role, stage]), abs=0.1), cells
    assert compared == len(others)
    assert {label for label, ns in by_hand.shares.items() if by_hand.percent(ns) > 0.1} <= seen
    for cells in rows(text, "At the same time") if by_hand.together else []:
        if len(cells) == 3:
            labels = tuple(
                (role, stage) for role, _, stage in (c.partition(" ") for c in cells[2].split(" + "))
            )
            ns = by_hand.together[labels]
            assert float(cells[1]) == pytest.approx(by_hand.percent(ns), abs=0.1), cells


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.parent.name} {step.name}")
def test_the_share_that_each_process_did_nothing_is_that_of_the_lines(step: Path) -> None:
    by_hand = ByHand(step)
    lines = rows(printed(step), "Idle")[: len(by_hand.busy)]
    printed_idle = {cells[0].rstrip("*"): float(cells[3]) for cells in lines}
    idle = {}
    for key, busy in by_hand.busy.items():
        role, _, rank = key.partition("_rank")
        name = f"{role} {rank.partition('_')[0]}" if rank else key.rpartition("_node-a_")[0] or key
        idle[name.partition("_host-a")[0]] = 100 * (1 - float(busy.mean()))
    assert printed_idle == pytest.approx(idle, abs=0.1)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.parent.name} {step.name}")
def test_the_share_that_the_last_trajectories_held_is_that_of_the_lines(step: Path) -> None:
    match = re.search(r"for the last (?:(\d+) )?of (\d+) trajectories: ([\d.]+) % of", printed(step))
    trajectories = sorted(ByHand(step).trajectories, key=lambda trajectory: trajectory[1])
    if match is None:
        assert len(trajectories) < 2
        return
    last = -(-len(trajectories) // 10)
    held_ns = trajectories[-1][1] - trajectories[-last - 1][1]
    whole_ns = trajectories[-1][1] - min(start for start, _ in trajectories)
    assert (int(match[1] or 1), int(match[2])) == (last, len(trajectories))
    assert float(match[3]) == pytest.approx(100 * held_ns / whole_ns, abs=0.1)
