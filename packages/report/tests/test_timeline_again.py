"""A step that was captured several times in one process: the last capture is the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packages.report.tests.steps import close, printed
from packages.report.tests.traces import add_trace, op
from stepscope.files.manifest.records import Expectation
from stepscope.files.sidecar import Artifact
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import cli, step_report
from stepscope_report.timeline import load_step, load_traces

MS = 1_000_000


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
    timeline = load_step(tried_again(tmp_path))
    assert timeline.captures == 2
    assert [process.name for process in timeline.processes] == ["trainer", "actor 0"]
    assert [span.stage for span in timeline.spans] == ["update", "update_actor"]
    assert (timeline.window.start_ns, timeline.window.wall_ns) == (OPENED_NS + 1000 * MS, 40 * MS)


def test_traces_of_an_earlier_capture_are_left_out(tmp_path: Path) -> None:
    path = tried_again(tmp_path)
    timeline = load_step(path)
    assert len(timeline.earlier_files) == 1
    assert load_traces(path, timeline).activities == ()


def test_the_report_says_that_there_was_an_earlier_one(tmp_path: Path) -> None:
    report = step_report(load_step(tried_again(tmp_path)))
    assert report.health.complete
    assert "Captured 2 times" in printed(report)


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
