"""Pages that `stepscope report` leaves, and `stepscope diff`."""

from __future__ import annotations

import re
from pathlib import Path

from packages.report.tests.commands import Command
from packages.report.tests.test_cli import MS, a_run, damage
from stepscope.files.manifest.records import Expectation
from stepscope.files.sidecar import Artifact
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run


def test_a_report_leaves_a_page_in_each_step_and_one_for_the_run(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path)
    assert command("report", tmp_path / "step_000002").err == f"Page: {tmp_path}/step_000002/report.html\n"
    assert pages_of(tmp_path) == ["step_000002/report.html"]
    command("report", tmp_path)
    assert pages_of(tmp_path) == ["report.html", "step_000002/report.html", "step_000004/report.html"]
    assert "./step_000004/report.html" in (tmp_path / "report.html").read_text()
    assert 'href="./spans/"' in (tmp_path / "step_000004" / "report.html").read_text()


def test_json_leaves_no_page_unless_asked_for(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path)
    command("report", tmp_path, "--json")
    command("report", tmp_path, "--no-html")
    assert pages_of(tmp_path) == []
    assert len(command("report", tmp_path, "--json", "--html").json["steps"]) == 2
    assert len(pages_of(tmp_path)) == 3


def test_a_folder_that_cannot_be_written_to_costs_the_page_alone(tmp_path: Path, command: Command) -> None:
    (a_run(tmp_path) / "step_000002" / "report.html").mkdir()
    printed = command("report", tmp_path, code=3)
    assert "Step 2 of" in printed.out
    assert f"error: {tmp_path}/step_000002/report.html " in printed.err
    assert "step_000002" not in (tmp_path / "report.html").read_text()


def pages_of(save_path: Path) -> list[str]:
    return sorted(str(path.relative_to(save_path)) for path in save_path.rglob("report.html"))


def test_a_page_links_to_the_artifacts_that_are_there_and_to_none_outside(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path, step=2)
    driver = folder.process("trainer", owner=True)
    (folder.layout.traces / "actor").mkdir(parents=True)
    (folder.layout.traces / "actor" / "t.json.gz").write_bytes(b"trace")
    (tmp_path / "outside.json").touch()
    outside = str(tmp_path / "outside.json")
    for path in ("traces/actor/t.json.gz", "traces/gone.json.gz", "../outside.json", outside):
        trace = Artifact(path=path, kind="torch_trace", tool="torch", role="actor", host="h", size_bytes=9)
        driver.expected.append(Expectation(name="torch trace", kind="trace", state="ok", artifacts=(trace,)))
    driver.close(10 * MS)
    folder.write()
    run(["report", str(tmp_path / "step_000002")])
    page = (tmp_path / "step_000002" / "report.html").read_text()
    assert [part.partition('"')[0] for part in page.split('href="./')[1:]] == [
        "spans/",
        "processes/",
        "traces/",
        "traces/actor/t.json.gz",
    ]


def test_two_steps_are_compared(tmp_path: Path, command: Command) -> None:
    steps = [str(a_run(tmp_path) / f"step_{step:06d}") for step in (2, 4)]
    printed = command("diff", *steps).out
    for phrase in (
        "A: step 2 of run run1",
        "B: step 4 of run run1",
        "What changed",
        "rollout",
        "+ opening, closing",
    ):
        assert phrase in printed
    comparison = command("diff", *steps, "--json").json
    assert (comparison["a"]["step_ns"], comparison["delta_ns"]) == (10 * MS, 0)


def test_two_runs_are_compared_also_within_one_folder(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path, (2, 4), "old")
    a_run(tmp_path, (4, 6), "new")
    both = [str(tmp_path), str(tmp_path), "--run-a", "old", "--run-b", "new"]
    assert re.search("B: 2 steps, 4 .*6 .*run new", command("diff", *both).out)
    assert "does not exist" in command("diff", tmp_path, tmp_path / "absent", code=2).err


def test_a_comparison_of_what_is_not_complete_exits_with_3(tmp_path: Path, command: Command) -> None:
    steps = [str(a_run(tmp_path) / f"step_{step:06d}") for step in (2, 4)]
    damage(tmp_path)
    assert "not complete" in command("diff", *steps, code=3).out
