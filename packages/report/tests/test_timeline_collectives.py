"""Clocks of hosts aligned by their collectives: real ones of gloo, under skews that the test knows."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from packages.report.tests.steps import MS, some
from packages.report.tests.traces import put as put_file
from stepscope.files.layout import sidecar_of
from stepscope.files.manifest import Expectation
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report.timeline import ProcessClock, load_step, merge_step
from stepscope_report.timeline.clocks import refine
from stepscope_report.timeline.rows import offset_at

S = 1_000 * MS
_BASE = re.compile(rb'("baseTimeNanoseconds": )(\d+)')


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return the traces of four ranks that reduced a hundred times, on the one clock of this machine."""
    assert torch.distributed.is_gloo_available()
    folder = tmp_path_factory.mktemp("gloo")
    main = Path(__file__).with_name("gloo_main.py")
    subprocess.run([sys.executable, str(main), str(folder), "4", "100"], check=True, timeout=300)
    return [(folder / f"rank{rank}.json").read_bytes() for rank in range(4)]


def extent_ns(traces: list[bytes]) -> tuple[int, int]:
    """From the first collective of all to the last one: a stall before it, on a busy machine, is not ours."""
    times = []
    for trace in traces:
        content = json.loads(trace)
        base_ns = content["baseTimeNanoseconds"]
        times += [
            base_ns + int((event["ts"] + event["dur"] * end) * 1000)
            for event in content["traceEvents"]
            if event["ph"] == "X" and event["name"].startswith("gloo:")
            for end in (0, 1)
        ]
    return min(times), max(times)


def ahead(trace: bytes, skew_ns: int) -> bytes:
    """As if recorded on a host whose clock is ahead."""
    return _BASE.sub(lambda match: match[1] + b"%d" % (int(match[2]) + skew_ns), trace)


def drifting(trace: bytes, since_ns: int, ppm: int) -> bytes:
    """As if recorded by a clock that gains, from `since_ns` on."""
    content = json.loads(trace)
    base_us = (content["baseTimeNanoseconds"] - since_ns) / 1000
    for event in content["traceEvents"]:
        if "ts" in event:
            event["ts"] += (event["ts"] + base_us) * ppm / 1_000_000
    return json.dumps(content).encode()


def without(trace: bytes, places: slice) -> bytes:
    """Return a trace that lacks some of its collectives, of each kind."""
    content = json.loads(trace)
    for name in ("gloo:all_reduce", "gloo:all_gather"):
        collectives = sorted(
            (e for e in content["traceEvents"] if e["name"] == name), key=lambda event: event["ts"]
        )
        for event in collectives[places]:
            content["traceEvents"].remove(event)
    return json.dumps(content).encode()


def put(folder: StepFolder, process: FakeProcess, trace: bytes, *, name: str = "") -> Artifact:
    """Return the trace of one of its processes."""
    info = process.info
    path = put_file(folder, f"traces/{info.role}/{name}rank{info.rank}.json", process, trace)
    return msgspec.json.decode(sidecar_of(path).read_bytes(), type=Sidecar).artifact


class Step:
    """A driver with ranks 0 and 1 on one host, ranks 2 and 3 on another whose clock is ahead."""

    def __init__(
        self, path: Path, traces: list[bytes], skew_ns: int, ppm: int = 0, *, capture: int = 1
    ) -> None:
        first_ns, last_ns = extent_ns(traces)
        self.folder = StepFolder(path, opened_ns=first_ns, capture=capture)
        self.lasted_ns = last_ns - first_ns
        self.driver = self.folder.process("trainer", owner=True)
        self.ranks = [
            self.folder.process("actor", 0, host="host-a"),
            self.folder.process("actor", 1, host="host-a"),
            self.folder.process("actor", 2, host="host-b", skew_ns=skew_ns, drift_ppm=ppm),
            self.folder.process("actor", 3, host="host-b", skew_ns=skew_ns, drift_ppm=ppm),
        ]
        for process, trace in zip(self.ranks, traces, strict=True):
            on_host_b = process.info.host == "host-b"
            put(
                self.folder,
                process,
                ahead(drifting(trace, first_ns, ppm) if on_host_b and ppm else trace, skew_ns * on_host_b),
            )
        for process in (self.driver, *self.ranks):
            process.close(self.lasted_ns)

    def clock(self) -> ProcessClock:
        """Return the clock of rank 2, after everything was written and read."""
        timeline = load_step(self.folder.write())
        (process,) = (process for process in timeline.processes if process.info.rank == 2)
        return process.clock


def test_collectives_of_an_earlier_capture_of_the_step_do_not_count(
    tmp_path: Path, recorded: list[bytes]
) -> None:
    first = StepFolder(tmp_path, opened_ns=extent_ns(recorded)[0] - 60 * S)
    first.process("trainer", owner=True).close(10 * MS)
    before = first.process("actor", 0, host="host-a")
    made = put(first, before, ahead(recorded[0], -60 * S), name="earlier_")
    before.expected.append(Expectation(name="torch trace", kind="trace", state="ok", artifacts=(made,)))
    before.close(10 * MS)
    first.write()
    clock = Step(tmp_path, recorded, 5 * MS, capture=2).clock()
    assert clock.alignment == "collectives", clock.note
    assert clock.matched == 200


@pytest.mark.parametrize("skew_ns", [5 * MS, -5 * MS, 11_560 * MS])
def test_collectives_alone_say_how_far_a_host_is_ahead(
    tmp_path: Path, recorded: list[bytes], skew_ns: int
) -> None:
    step = Step(tmp_path, recorded, skew_ns)
    clock = step.clock()
    assert clock.alignment == "collectives", clock.note
    within_ns = some(clock.uncertainty_ns)
    assert abs(clock.offset_ns - skew_ns) <= within_ns < 5 * MS + step.lasted_ns // 1000
    assert abs(clock.closing_offset_ns - skew_ns) <= within_ns
    assert clock.matched == 200


def entered_and_left(path: Path) -> list[tuple[float, float]]:
    """Return, for each all-reduce in the merged timeline, when the last rank entered and the first one
    left.
    """
    events = json.loads(gzip.decompress((path / "timeline.json.gz").read_bytes()))["traceEvents"]
    ranks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["name"] == "gloo:all_reduce":
            ranks.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    together = zip(*(sorted(rank) for rank in ranks.values()), strict=True)
    return [(max(start for start, _ in times), min(end for _, end in times)) for times in together]


def test_in_the_merged_timeline_no_rank_leaves_before_the_last_has_entered(
    tmp_path: Path, recorded: list[bytes]
) -> None:
    step = Step(tmp_path, recorded, 11_560 * MS)
    path = step.folder.write()
    merged = merge_step(path)
    rows = {row.rank: row for row in merged.rows}
    assert [rows[rank].alignment for rank in range(4)] == ["same host"] * 2 + ["collectives"] * 2
    assert (rows[2].matched, rows[2].note) == (200, None)
    extents = entered_and_left(path)
    assert len(extents) == 100
    assert all(entered < left for entered, left in extents)


def test_collectives_sharpen_a_poor_sample(tmp_path: Path, recorded: list[bytes]) -> None:
    step = Step(tmp_path, recorded, 11_560 * MS)
    for at_ns in (0, step.lasted_ns):
        step.driver.measures(step.ranks[2], at_ns, uncertainty_ns=20 * MS, error_ns=13 * MS)
    clock = step.clock()
    assert (clock.alignment, clock.note) == ("collectives", None)
    assert abs(clock.offset_ns - 11_560 * MS) <= some(clock.uncertainty_ns) < 20 * MS


def test_a_sample_that_knows_more_stays(tmp_path: Path, recorded: list[bytes]) -> None:
    step = Step(tmp_path, recorded, 5 * MS)
    for at_ns in (0, step.lasted_ns):
        step.driver.measures(step.ranks[2], at_ns, uncertainty_ns=500)
    clock = step.clock()
    assert (clock.alignment, clock.offset_ns, clock.uncertainty_ns) == (
        "measured",
        5 * MS,
        502,
    )  # and rounding


def test_one_ranks_sample_serves_its_host(tmp_path: Path, recorded: list[bytes]) -> None:
    step = Step(tmp_path, recorded, 5 * MS)
    for at_ns in (0, step.lasted_ns):
        step.driver.measures(step.ranks[3], at_ns, uncertainty_ns=10_000)
    clock = step.clock()
    assert clock.alignment == "collectives"
    assert abs(clock.offset_ns - 5 * MS) <= some(clock.uncertainty_ns) < 20_000


def test_a_drift_of_200_ppm_is_found(tmp_path: Path, recorded: list[bytes]) -> None:
    step = Step(tmp_path, recorded, 11_560 * MS, ppm=200)
    clock = step.clock()
    assert clock.alignment == "collectives", clock.note
    within_ns = some(clock.uncertainty_ns)
    assert abs(clock.offset_ns - 11_560 * MS) <= within_ns
    gained_ns = step.ranks[2].wall_ns(step.lasted_ns) - step.driver.wall_ns(step.lasted_ns)
    assert abs(clock.closing_offset_ns - gained_ns) <= within_ns


@pytest.mark.parametrize(
    "collectives", [slice(None, 20), slice(80, None), slice(0)], ids=["early", "late", "all"]
)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled at the start", "never sampled"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("ppm", [14, -200, 200])
def test_collectives_that_do_not_bracket_a_step_leave_room_for_drift(
    tmp_path: Path, recorded: list[bytes], collectives: slice, sampled: bool, closed: bool, ppm: int
) -> None:
    kept = [without(trace, collectives) for trace in recorded]
    step = Step(tmp_path, kept, 5 * MS, ppm=ppm)
    if sampled:
        step.driver.measures(step.ranks[2], 0, uncertainty_ns=100_000, error_ns=90_000)
    until_ns = 3 * step.lasted_ns  # the step goes on behind the last collective
    for process in (step.driver, *step.ranks):
        process.close(until_ns)
    if not closed:
        step.ranks[2].closed_ns = step.ranks[3].closed_ns = None
    timeline = load_step(step.folder.write())
    (rank,) = (process for process in timeline.processes if process.info.rank == 2)
    within_ns = rank.clock.uncertainty_ns
    if within_ns is None:
        assert not sampled
        return
    for at_ns in range(0, until_ns + 1, until_ns // 10):
        wall_ns = step.ranks[2].wall_ns(at_ns)
        placed_ns = wall_ns - offset_at(rank, wall_ns)
        assert abs(placed_ns - step.driver.wall_ns(at_ns)) <= within_ns + 2


def test_a_sample_that_collectives_contradict_is_kept_and_it_is_said(
    tmp_path: Path, recorded: list[bytes]
) -> None:
    step = Step(tmp_path, recorded, 11_560 * MS)
    step.driver.measures(step.ranks[2], 0, uncertainty_ns=MS, error_ns=300 * MS)
    clock = step.clock()
    assert (clock.alignment, clock.offset_ns) == ("measured", 11_860 * MS)
    assert "contradict" in (clock.note or "")


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ([slice(0), slice(0), slice(0), slice(95, 100)], "100 against 95"),
        ([slice(0), slice(0), slice(95, 100), slice(95, 100)], "100 against 95"),
        ([slice(95, 100), slice(95, 100), slice(5), slice(5)], "contradict|which is which"),
    ],
    ids=["of one rank", "of one host", "of both, at different ends"],
)
def test_partial_windows_are_not_matched_and_it_is_said(
    tmp_path: Path, recorded: list[bytes], missing: list[slice], why: str
) -> None:
    traces = [without(trace, places) for trace, places in zip(recorded, missing, strict=True)]
    clock = Step(tmp_path, traces, 5 * MS).clock()
    assert clock.alignment == "unaligned"
    assert re.search(why, clock.note or "")


def test_of_several_groups_unnamed_collectives_are_not_matched(tmp_path: Path, recorded: list[bytes]) -> None:
    more = b'"pg_config": [{"pg_name": "1", "ranks": [0, 2]}, '
    traces = [trace.replace(b'"pg_config": [', more) for trace in recorded]
    clock = Step(tmp_path, traces, 5 * MS).clock()
    assert clock.alignment == "unaligned"
    assert "process group" in (clock.note or "")


def test_on_one_host_no_trace_is_searched(
    folder: StepFolder, recorded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.process("trainer", owner=True).close(S)
    actor = folder.process("actor", 0)
    actor.close(S)
    put(folder, actor, recorded[0])
    monkeypatch.setattr(refine, "read_collectives", pytest.fail)
    assert load_step(folder.write()).processes[1].clock.alignment == "same host"


TWO_DISKS = """
import os, sys
from pathlib import Path
from ray.cluster_utils import Cluster
from stepscope_report.cli.ray_nodes import connected
from stepscope.files.layout import StepLayout
from stepscope_report.timeline import load_step, merge_step

here, there, to = sys.argv[1:]
cluster = Cluster(False)
for folder in (here, there):
    os.chdir(folder)
    cluster.add_node(num_cpus=1, include_dashboard=False)
os.chdir(here)
step = StepLayout("/proc/self/cwd/step_000002")  # in the folder of each node
try:
    with connected(cluster.address, 1) as nodes:
        nodes.add_step(step)
        assert sorted(path.name for path in nodes.elsewhere) == ["rank2.json", "rank3.json"]
        alignments = [process.clock.alignment for process in load_step(step.root, executor=nodes).processes]
        assert alignments[3:] == ["collectives", "collectives"], alignments
        nodes.fetch_traces()
        merge_step(step.root, to=Path(to))
finally:
    cluster.shutdown()
"""


def test_collectives_in_traces_that_only_another_node_has_align_its_clock(
    tmp_path: Path, recorded: list[bytes]
) -> None:
    large = [trace.rstrip()[:-1] + b" " * (1 << 20) + b"}" for trace in recorded]  # a small one is fetched
    path = Step(tmp_path / "here", large, 11_560 * MS).folder.write()
    merge_step(path)
    assert all(entered < left for entered, left in entered_and_left(path))
    whole = (path / "timeline.json.gz").read_bytes()
    shutil.rmtree(path / ".digests")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for side, ranks in (("here", (2, 3)), ("there", (0, 1))):
        for rank in ranks:
            (tmp_path / side / path.name / "traces" / "actor" / f"rank{rank}.json").unlink()
    sides = [str(tmp_path / name) for name in ("here", "there", "by_ray.json.gz")]
    subprocess.run([sys.executable, "-c", TWO_DISKS, *sides], check=True, timeout=300)
    assert Path(sides[-1]).read_bytes() == whole
