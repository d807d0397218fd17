"""Pages that `stepscope report` leaves, and `stepscope diff`."""

from __future__ import annotations

from pathlib import Path

from packages.report.tests.commands import Command
from packages.report.tests.test_cli import MS, a_run
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
