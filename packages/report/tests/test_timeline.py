from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.steps import MS, Row, a_step, close, printed, some
from packages.report.tests.traces import add_trace, op
from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor, ClockOffset
from stepscope.files.manifest import Expectation, ProcessPart, awaited
from stepscope.files.sidecar import Artifact, ProcessInfo
from stepscope.files.spans import SpanLink
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import cli, step_report
from stepscope_report.timeline import Timeline, load_step, load_traces
from stepscope_report.timeline.clocks import Reference, align, align_owner
from stepscope_report.timeline.rows import names_of
from stepscope_report.timeline.tree import cut_cycles

S = 1_000 * MS


def placed(timeline: Timeline) -> dict[str, tuple[int, int | None]]:
    """(start, end) of each stage, in ns after the capture opened."""
    return {
        span.stage: (span.start_ns - OPENED_NS, None if span.end_ns is None else span.end_ns - OPENED_NS)
        for span in timeline.spans
    }


def test_a_measured_offset_on_the_owners_host_is_the_noise_of_the_exchange() -> None:
    anchor = ClockAnchor(wall_ns=100 * S, mono_ns=0)
    owner = align_owner(anchor, None)
    noise = ClockOffset(process="p", offset_ns=300, uncertainty_ns=1_000, at_mono_ns=0)
    aligned = align("p", "h", anchor, None, Reference("h", owner.place, 0, [noise]))
    assert (aligned.clock.alignment, aligned.clock.offset_ns, aligned.place(5)) == (
        "same host", 0, 100 * S + 5,
    )  # fmt: skip


def test_two_machines_of_one_name_are_told_apart_by_their_clocks() -> None:
    anchor = ClockAnchor(wall_ns=100 * S, mono_ns=0)
    owner = align_owner(anchor, None)
    apart = ClockOffset(process="p", offset_ns=2 * S, uncertainty_ns=1_000, at_mono_ns=0)
    aligned = align(
        "p", "h", ClockAnchor(wall_ns=102 * S, mono_ns=7), None, Reference("h", owner.place, 0, [apart])
    )
    assert (aligned.clock.alignment, aligned.place(7)) == ("measured", 100 * S)


def test_the_surer_of_two_measurements_counts_where_the_other_says_nothing() -> None:
    anchor, end = ClockAnchor(wall_ns=0, mono_ns=0), ClockAnchor(wall_ns=10 * S, mono_ns=10 * S)
    owner = align_owner(anchor, end)
    sure = ClockOffset(process="p", offset_ns=5_000, uncertainty_ns=1_000, at_mono_ns=0)
    busy = ClockOffset(process="p", offset_ns=2 * S, uncertainty_ns=3 * S, at_mono_ns=10 * S)
    aligned = align("p", "other", anchor, end, Reference("h", owner.place, 0, [sure, busy]))
    assert aligned.place(10 * S) == 10 * S - 5_000
    assert aligned.clock.uncertainty_ns == pytest.approx(1_000 + 2_000_000, abs=500)  # 10 s at 200 ppm


def test_a_wall_clock_that_was_set_meanwhile_does_not_stretch_the_spans() -> None:
    opened = ClockAnchor(wall_ns=100 * S, mono_ns=0)
    closed = ClockAnchor(wall_ns=90 * S, mono_ns=10 * S)  # set back by 20 s
    aligned = align_owner(opened, closed)
    assert aligned.place(10 * S) == 110 * S
    assert aligned.clock.jumped
    assert aligned.clock.uncertainty_ns == 20 * S


def test_a_killed_workers_spans_are_kept_and_its_open_one_has_no_end(tmp_path: Path) -> None:
    rows: list[Row] = [("actor compute_log_prob", 1, 3), ("actor update_actor", 4, None)]
    folder = a_step(tmp_path, 10, rows)
    actor = folder.processes[1]
    actor.closed_ns = None
    timeline = load_step(folder.write())
    assert placed(timeline) == {"compute_log_prob": (MS, 3 * MS), "update_actor": (4 * MS, None)}
    killed = timeline.processes[1]
    assert (killed.closed_ns, killed.last_ns - OPENED_NS, killed.dropped) == (None, 4 * MS, None)
    assert timeline.until_ns(timeline.spans[1]) - OPENED_NS == 4 * MS
    (awaited,) = some(timeline.manifest).awaited()
    assert awaited.startswith(f"{actor.info.key}: spans: pending: ")


def test_an_open_span_of_a_process_that_closed_ran_until_then(tmp_path: Path) -> None:
    timeline = load_step(a_step(tmp_path, 10, [("trainer rollout", 1, None)]).write())
    assert timeline.until_ns(timeline.spans[0]) - OPENED_NS == 10 * MS


def test_parents_are_found_in_the_process_and_by_links_across_processes(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    replica = folder.process("rollout", 0)
    trajectory = driver.span("trajectory", 0, 9 * MS, trajectory="t1")
    turn = driver.span("turn", 1 * MS, 8 * MS, parent=trajectory)
    replica.span("generate", 2 * MS, 7 * MS, link=driver.link(turn))
    earlier, ended = (SpanLink(process=driver.info.key, span=number, step=1) for number in (turn, 99))
    replica.span("of_a_turn_begun_earlier", 2 * MS, 7 * MS, link=earlier)
    replica.span("of_another_step", 2 * MS, 7 * MS, link=ended)
    replica.span("of_a_stranger", 2 * MS, 7 * MS, link=SpanLink(process="gone", span=1))
    for process in (driver, replica):
        process.close(10 * MS)
    timeline = load_step(folder.write())
    names = [span.stage for span in timeline.spans]
    above = {span.stage: None if span.parent is None else names[span.parent] for span in timeline.spans}
    assert above == {
        "trajectory": None, "turn": "trajectory", "generate": "turn", "of_another_step": None,
        "of_a_turn_begun_earlier": "turn",
        "of_a_stranger": None,
    }  # fmt: skip


def test_a_cycle_of_links_is_cut() -> None:
    parents: list[int | None] = [1, 2, 0, 0, 4, None]
    cut_cycles(parents)
    assert parents == [1, 2, None, 0, None, None]


def test_two_runs_in_one_folder_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path
    for number, run_id in enumerate(("old", "new")):
        folder = StepFolder(tmp_path, run_id=run_id)
        driver = folder.process("trainer", owner=True, skew_ns=number * 3600 * S)
        driver.span(f"of_{run_id}", 0, MS)
        driver.close(2 * MS)
        path = folder.write()
    latest = load_step(path)
    assert (latest.run_id, latest.runs) == ("new", ("old", "new"))
    assert [span.stage for span in latest.spans] == ["of_new"]
    assert [span.stage for span in load_step(path, run_id="old").spans] == ["of_old"]
    with pytest.raises(RecordError, match=r"'other'; .*: old, new"):
        load_step(path, run_id="other")


def test_without_the_owner_the_window_is_what_the_others_saw(folder: StepFolder) -> None:
    actor = folder.process("actor", 0)
    actor.span("update_actor", 4 * MS, 6 * MS)
    actor.close(8 * MS)
    window = load_step(folder.write()).window
    assert (window.wall_ns, window.opened, window.closed) == (8 * MS, False, False)


def test_a_window_whose_owner_was_killed_ends_with_the_last_sign_of_life(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    driver.span("rollout", 0, None)
    actor = folder.process("actor", 0)
    actor.span("update_actor", 4 * MS, 7 * MS)
    window = load_step(folder.write()).window
    assert (window.wall_ns, window.opened, window.closed) == (7 * MS, True, False)


def test_of_ranks_that_each_opened_their_own_capture_the_first_is_the_owner(folder: StepFolder) -> None:
    for rank in (1, 0):
        folder.process("trainer", rank, owner=True).close(10 * MS)
    assert [process.name for process in load_step(folder.write()).processes] == ["trainer 0", "trainer 1"]


def info(
    role: str, rank: int | None = None, pid: int = 1, host: str = "h", replica: int | None = None
) -> ProcessInfo:
    return ProcessInfo(role=role, rank=rank, world_size=None, host=host, pid=pid, replica=replica)


def test_processes_have_names_for_people_and_no_two_the_same() -> None:
    named = {
        "trainer": info("trainer"),
        "actor 0": info("actor", 0, pid=1),
        "actor 1 pid 2": info("actor", 1, pid=2),
        "actor 1 pid 3": info("actor", 1, pid=3),
        "rollout replica 1": info("rollout", replica=1),
        "env pid 1 on a": info("env", pid=1, host="a"),
        "env pid 1 on b": info("env", pid=1, host="b"),
    }
    assert names_of(list(named.values())) == list(named)


def test_a_process_whose_part_could_not_say_so_has_closed_by_its_span_file(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    driver.span("update", 1 * MS, 3 * MS)
    driver.close(10 * MS)
    folder.write()
    part = msgspec.json.decode(driver.part_path.read_bytes(), type=ProcessPart)
    unsaid = (awaited("spans", "spans", "closing"), awaited("torch trace", "trace", "closing"))
    driver.part_path.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(part, closed=None, expected=unsaid))
    )
    manifest = some(load_step(folder.layout.root).manifest)
    (line,) = manifest.problems()
    assert line.startswith(f"{driver.info.key}: torch trace: missing: ")


# A step that was captured several times in one process: the last capture is the step.


def tried_again(root: Path) -> Path:
    """Return a step whose first attempt has a worker that the second one lacks, and fails after 10 ms."""
    first = StepFolder(root)
    driver, _, gone = (
        first.process("trainer", owner=True), first.process("actor", 0), first.process("critic", 0),
    )  # fmt: skip
    driver.span("first_try", 0, 10 * MS)
    gone.span("first_try", 0, 9 * MS)
    add_trace(first, driver, [op("aten::first", 0, 5_000)])
    (trace,) = first.layout.traces.rglob("*.json*gz")
    made = Artifact(
        path=trace.relative_to(first.layout.root).as_posix(), kind="torch_trace", tool="torch",
        role="trainer", host="host-a", size_bytes=1,
    )  # fmt: skip
    driver.expected.append(Expectation(name="torch trace", kind="trace", state="ok", artifacts=(made,)))
    close(first, 10 * MS)
    first.write()
    again = StepFolder(root, opened_ns=OPENED_NS + 1000 * MS, capture=2)
    driver, actor = again.process("trainer", owner=True), again.process("actor", 0)
    driver.span("update", 0, 40 * MS)
    actor.span("update_actor", 5 * MS, 35 * MS)
    close(again, 40 * MS)
    return again.write()


def test_the_last_capture_is_the_step(tmp_path: Path) -> None:
    """The report says that there was an earlier one, whose traces are left out."""
    path = tried_again(tmp_path)
    timeline = load_step(path)
    assert timeline.captures == 2
    assert [process.name for process in timeline.processes] == ["trainer", "actor 0"]
    assert [span.stage for span in timeline.spans] == ["update", "update_actor"]
    assert (timeline.window.start_ns, timeline.window.wall_ns) == (OPENED_NS + 1000 * MS, 40 * MS)
    assert len(timeline.earlier_files) == 1
    assert load_traces(path, timeline).activities == ()
    report = step_report(timeline)
    assert report.health.complete
    assert "Captured 2 times" in printed(report)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("rank", [None, 0])
def test_a_step_that_a_resumed_run_repeats_is_that_of_the_last_process(
    tmp_path: Path, rank: int | None, killed: bool
) -> None:
    path = tmp_path
    for pid, at_ms in ((100, 0), (200, 5000)):
        folder = StepFolder(tmp_path, opened_ns=OPENED_NS + at_ms * MS)
        for number in range(1 if rank is None else 2):
            trainer = folder.process(
                "trainer", None if rank is None else number, owner=True, pid=pid + number
            )
            trainer.imported_at_ns = -900 * MS
            trainer.span("update", 5 * MS, 25 * MS)
            if pid == 200 or not killed:
                trainer.close(30 * MS)
        path = folder.write()
    timeline = load_step(path)
    assert (timeline.captures, timeline.window.wall_ns) == (2, 30 * MS)
    assert {process.info.pid // 100 for process in timeline.processes} == {2}
    assert [span.stage for span in timeline.spans] == ["update"] * len(timeline.processes)


@pytest.mark.parametrize("skew_s", [-30, 0, 30])
@pytest.mark.parametrize("kind", ["ranks", "measured", "workers"])
def test_parts_of_other_hosts_belong_to_an_attempt_whatever_their_clocks(
    tmp_path: Path, kind: str, skew_s: int
) -> None:
    """Workers that nobody measured are told apart if the attempts lie further apart than the clocks."""
    path = tmp_path
    for pid, at_ms in ((100, 0), (200, 5000 if kind != "workers" else 200_000)):
        folder = StepFolder(tmp_path, opened_ns=OPENED_NS + at_ms * MS)
        other, skew_ns = kind == "ranks", skew_s * 1000 * MS
        first = folder.process("trainer", 0, owner=True, pid=pid)
        elsewhere = folder.process(
            "trainer" if other else "actor", 1, owner=other, pid=pid, host="host-b", skew_ns=skew_ns
        )
        if kind == "measured":
            first.measures(elsewhere, 0)
        for process in (first, elsewhere):
            process.imported_at_ns = -900 * MS
            process.span("update", 5 * MS, 25 * MS)
            process.close(30 * MS)
        path = folder.write()
    timeline = load_step(path)
    assert [(process.info.host, process.info.pid) for process in timeline.processes] == [
        ("host-a", 200), ("host-b", 200),
    ]  # fmt: skip


RETRIED = """
import sys
from stepscope import ProfileConfig, capture, span
config = ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}})
for left in (2, 1, 0):
    try:
        with capture(1, config=config), span("generate", role="rollout"):
            if left:
                raise RuntimeError("CUDA out of memory")
    except RuntimeError:
        pass
"""
REPLACED = """
import os, sys
from stepscope import ProfileConfig, capture, span
config = ProfileConfig(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}})
opened = capture(1, config=config).open()
with span("generate", role="rollout"):
    pass
if "again" not in sys.argv:
    os.execv(sys.executable, [sys.executable, sys.argv[0], sys.argv[1], "again"])
opened.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [RETRIED, REPLACED], ids=["retried", "replaced"])
def test_log_ls_manifest_and_report_are_of_the_last_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    script, run_folder = tmp_path / "program.py", tmp_path / "run"
    script.write_text(program)
    environment = {**os.environ, "STEPSCOPE_RUN_ID": "abcd1234"}
    done = subprocess.run(
        [sys.executable, str(script), str(run_folder)],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ": 1 process, 0 traces" in done.stderr
    assert "processes" not in done.stderr
    assert cli.run(["ls", str(run_folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["processes"], row["error"], row["problems"]) == ("ok", 1, None, [])
    assert cli.run(["report", str(run_folder), "--no-html"]) == 0
    manifest = json.loads((run_folder / "step_000001" / "manifest.json").read_text())
    assert (manifest["state"], len(manifest["processes"])) == ("ok", 1)
    assert len(list((run_folder / "step_000001" / "processes").glob("*.json"))) > 1
