"""The commands as they are typed: what they print, and with which exit code they end.

One file above 400 lines: every command is run and read in the same way.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import stepscope_report
from packages.report.tests.commands import Command
from packages.report.tests.steps import MS
from stepscope import ProfileConfig, capture, flush
from stepscope.errors import RecordError
from stepscope.files.manifest import Expectation
from stepscope.files.run import RunRecord
from stepscope.files.sidecar import Artifact
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report import OpenRun
from stepscope_report.cli import run
from stepscope_report.cli.app import BROKEN_PIPE
from stepscope_report.cli.mcp import Tools
from stepscope_report.cli.what_if import longest_step


def a_run(
    save_path: Path, steps: Sequence[int] = (2, 4), run_id: str = "run1", *, opened_ns: int = OPENED_NS
) -> Path:
    """Return a run with these captured steps: a driver whose rollout takes 8 of 10 ms."""
    for step in steps:
        folder = StepFolder(save_path, step=step, run_id=run_id, opened_ns=opened_ns)
        driver = folder.process("trainer", owner=True)
        driver.span("rollout", 0, 8 * MS, role="agent_loop")
        driver.close(10 * MS)
        folder.write()
    return save_path


def damage(save_path: Path, step: int = 2) -> None:
    (spans,) = (save_path / f"step_{step:06d}" / "spans").iterdir()
    with spans.open("ab") as file:
        file.write(b'{"kind": "sp')


def test_a_run_is_reported_step_by_step(tmp_path: Path, command: Command) -> None:
    printed = command("report", a_run(tmp_path))
    for phrase in ("Step 2 of run run1", "Step 4 of run run1", "agent_loop", "8.00 ms", "80.0", "Steps"):
        assert phrase in printed.out
    pages = f"Page: {tmp_path}/report.html and 2 for its steps\n"
    assert printed.err.partition("\n")[2] == pages
    assert "--full" in printed.err


HEADINGS = ("Where it went", "Idle", "Steps")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "Where it went, Steps"),
        (["--full"], "Where it went, Idle, Steps"),
        (["--step", "2"], "Where it went, Idle"),
        (["--step", "2", "--short"], "Where it went"),
    ],
)
def test_several_steps_are_told_in_short_and_one_in_full(
    words: list[str], shown: str, tmp_path: Path, command: Command
) -> None:
    printed = command("report", a_run(tmp_path), *words, "--no-html").out
    lines = {line.strip() for line in printed.splitlines()}
    assert [heading for heading in HEADINGS if heading in lines] == shown.split(", ")


def test_what_is_broken_or_gone_is_reported_around_and_exits_with_3(tmp_path: Path, command: Command) -> None:
    assert "10.0 ms" in command("ls", a_run(tmp_path)).out
    damage(tmp_path)
    (tmp_path / "step_000009" / "spans").mkdir(parents=True)
    printed = command("report", tmp_path, code=3)
    assert "cut off" in printed.out
    assert "Step 4" in printed.out
    assert "step_000009: " in printed.err


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A folder in which a run was resumed. The newer one has captured 40 again and 50, and not 44."""
    a_run(tmp_path, (40, 44), "before")
    return a_run(tmp_path, (40, 50), "resumed", opened_ns=OPENED_NS + 60_000 * MS)


def test_a_folder_of_two_runs_is_read_as_the_newest_and_the_rest_is_named(
    resumed: Path, command: Command
) -> None:
    printed = command("report", resumed, "--json")
    document = json.loads(printed.out)
    assert [(step["step"], step["run_id"]) for step in document["steps"]] == [
        (40, "resumed"),
        (50, "resumed"),
    ]
    assert document["others"] == {"before": [44]}
    assert "step 44 of" in printed.err
    command("report", resumed)
    assert "step 44 of" in resumed.joinpath("report.html").read_text()
    shown = command("report", resumed, "--by", "stage", "--json")
    assert {step["run_id"] for step in shown.json["steps"]} == {"resumed"}
    change = command("diff", resumed, resumed, "--run-a", "before", "--json").json
    assert (change["a"]["runs"], change["a"]["steps"]) == (["before"], [40, 44])
    assert (change["b"]["runs"], change["b"]["steps"]) == (["resumed"], [40, 50])
    assert longest_step(resumed).run_id == "resumed"


def test_a_step_that_the_newest_run_lacks_is_read_where_it_is_named(resumed: Path, command: Command) -> None:
    document = command("report", resumed, "--step", "44", "--json").json
    assert [(step["step"], step["run_id"]) for step in document["steps"]] == [(44, "before")]
    assert document["others"] == {}
    assert "--run: before" in command("report", resumed, "--run", "resumed").out
    shown = command("report", resumed, "--run", "before", "--json")
    assert [step["step"] for step in shown.json["steps"]] == [40, 44]
    assert command("diff", resumed, resumed, "--steps-a", "44", "--json").json["a"]["runs"] == ["before"]
    assert json.loads(Tools(resumed).query_spans(".", step=44))["step"] == 44


def test_opened_in_a_notebook_a_folder_of_two_runs_is_the_newest(resumed: Path) -> None:
    opened = stepscope_report.open(resumed)
    assert isinstance(opened, OpenRun)
    assert {report.run_id for report in opened.report()} == {"resumed"}
    assert (list(opened), opened.others) == ([40, 50], {"before": [44]})
    assert "step 44 of" in opened.brief()
    with pytest.raises(KeyError, match="run='before'"):
        opened[44]
    before = stepscope_report.open(resumed, run="before")
    assert isinstance(before, OpenRun)
    assert list(before) == [40, 44]
    with pytest.raises(RecordError, match=r"'no'.*: resumed, before"):
        stepscope_report.open(resumed, run="no")


def test_what_the_last_step_of_the_newest_run_never_ended_is_shown(tmp_path: Path, command: Command) -> None:
    for run_id, step, stage, later_ms in (("before", 90, "old", 0), ("resumed", 82, "stuck", 60_000)):
        folder = StepFolder(tmp_path, step=step, run_id=run_id, opened_ns=OPENED_NS + later_ms * MS)
        folder.process("trainer", owner=True).span(stage, 0, None)
        folder.write()
    text = command("why", tmp_path, "--wait", "0.1", code=3).out
    assert "Step 82" in text
    assert "stuck" in text


def test_a_merge_of_a_role_that_is_not_there_keeps_the_timeline_and_names_those_that_are(
    tmp_path: Path, command: Command
) -> None:
    step = a_run(tmp_path) / "step_000002"
    command("merge", step)
    before = (step / "timeline.json.gz").read_bytes()
    message = command("merge", step, "--roles", "traner", code=2).err
    assert "roles is 'traner'" in message
    assert "trainer" in message
    assert (step / "timeline.json.gz").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{}/absent"], "does not exist. {} holds: empty, file, runs"),
        (["report", "{}/file"], "no trace that is read here"),
        (["report", "{}/empty"], "holds no captured step: looked for run.json and folders like step_000002"),
        (["report", "{}/empty"], "it holds: nothing. It holds no trace either."),
        (["report", "{}/runs"], "is no run, but there are runs in it: first"),
        (
            ["report", "{}/runs/first/step_000002/spans"],
            "is a folder inside a step: give the step's: {}/runs/first/step",
        ),
        (["report", "{}/runs/first", "--step", "3"], "holds no step 3. Captured: 2, 4"),
        (["report", "{}/runs/first/step_000002", "--step", "2"], "is the folder of one step: omit --step"),
        (["ls", "{}/empty"], "does the training loop open `capture(step)`"),
    ],
)
def test_a_path_that_is_no_run_is_answered_with_what_is_there(
    tmp_path: Path, command: Command, arguments: list[str], message: str
) -> None:
    a_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    printed = command(*(argument.format(tmp_path) for argument in arguments), code=2)
    assert message.format(tmp_path) in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("steps", "message"),
    [([], "selects no step: set `steps`"), ([100], "selects steps [100]: the run has reached none of them")],
)
def test_a_run_without_captured_steps_says_why(
    tmp_path: Path, command: Command, steps: list[int], message: str
) -> None:
    record = RunRecord(
        run_id="r", started_ns=0, host="h", pid=1, command=("train.py",), config={"steps": steps}, versions={}
    )
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    assert message in command("report", tmp_path, code=3).err


@pytest.mark.parametrize("columns", ["30", "0", "-5", "x"])
def test_no_number_is_broken_in_a_narrow_terminal(
    columns: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = command("ls", a_run(tmp_path)).out
    assert shown.count("10.0 ms") == 2
    assert "2025-06-15" in shown


@pytest.mark.slow
def test_a_step_that_may_not_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    prefix = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if prefix and (shutil.which("setpriv") is None or subprocess.run([*prefix, "true"]).returncode):
        pytest.skip("root reads every folder here")
    printed = []
    (path / "step_000004").chmod(0)
    try:
        for verb in ("ls", "report"):
            words = [*prefix, sys.executable, "-m", "stepscope", verb, str(path), "--json"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert done.returncode == 3, done.stderr
            printed.append(json.loads(done.stdout))
    finally:
        (path / "step_000004").chmod(0o700)
    rows, report = printed
    assert {row["step"]: bool(row["problems"]) for row in rows} == {2: False, 4: True}
    assert [step["step"] for step in report["steps"]] == [2]
    assert list(report["unreadable"]) == ["step_000004"]


def test_ls_shows_each_step_with_its_state_and_what_is_missing(tmp_path: Path, command: Command) -> None:
    folder = StepFolder(tmp_path, step=2)
    driver = folder.process("trainer", owner=True)
    trace = Artifact(
        path="traces/t.json.gz", kind="torch_trace", tool="torch", role="actor", host="h", size_bytes=9
    )
    driver.expected.append(Expectation(name="torch trace", kind="trace", state="ok", artifacts=(trace,)))
    driver.close(10 * MS)
    folder.process("actor", 1)
    folder.write()
    printed = command("ls", tmp_path, code=3).out
    assert "pid1001: spans: pending: " in " ".join(printed.split())
    (row,) = command("ls", tmp_path, "--json", code=3).json
    assert (row["step"], row["run_id"], row["state"], row["wall_ns"]) == (2, "run1", "pending", 10 * MS)
    assert (row["processes"], row["artifacts"], len(row["pending"])) == (2, 1, 1)
    assert row["bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


def test_validate_shows_the_resolved_configuration_and_its_steps(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stepscope.yaml"
    path.write_text('steps: [2, "10:50:10"]\nmode: discrete\n')
    monkeypatch.setenv("STEPSCOPE_MODE", "continuous")
    printed = command("validate", path).out
    assert "mode: continuous" in printed
    assert "STEPSCOPE_MODE" in printed
    assert "2, 10, 20, 30, 40 (of those below 100)" in printed
    assert command("validate", path, "--json", "--below", "30").json["steps"] == [2, 10, 20]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("mod: discrete\n", 2, "mode"),
        (None, 2, "No such file"),
        ("steps: []\n", 0, "`steps` selects nothing"),
    ],
    ids=["a wrong setting", "no file", "no step"],
)
def test_validate_says_what_is_wrong_or_selects_nothing(
    text: str | None, code: int, message: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "stepscope.yaml"
    if text is not None:
        path.write_text(text)
    printed = command("validate", path, code=code)
    assert message in printed.err
    assert code == 0 or printed.out == ""


def test_an_error_has_a_traceback_only_when_asked_for(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stepscope.yaml"
    path.write_text("mode: wrong\n")
    assert "Traceback" not in command("validate", path, code=2).err
    with pytest.raises(ValueError, match="mode is 'wrong'"):
        run(["--traceback", "validate", str(path)])
    monkeypatch.setenv("STEPSCOPE_RAISE", "1")
    with pytest.raises(ValueError, match="mode is 'wrong'"):
        run(["validate", str(path)])


def test_an_error_of_ours_is_one_message_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("stepscope_report.cli.demo.find_spec", broken)
    message = command("demo", code=1).err
    assert message.startswith("error: KeyError: 'torch'\n")
    assert "`--traceback`" in message


@pytest.mark.parametrize("arguments", [["report"], ["unknown"], ["report", "x", "--jobs", "two"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], command: Command) -> None:
    assert "Usage: stepscope" in command(*arguments, code=2).err


def test_help_names_the_exit_codes_and_the_version_is_shown(command: Command) -> None:
    assert "Exit codes: 0 success" in command("--help").out
    assert command("--version").out.startswith("stepscope 0.")


def a_trace(save_path: Path, content: bytes) -> Path:
    """Return the folder of step 2, with a trace in it that nothing describes."""
    step = a_run(save_path) / "step_000002"
    (step / "traces" / "actor").mkdir(parents=True)
    (step / "traces" / "actor" / "t.json").write_bytes(content)
    return step


def test_without_traces_none_is_opened(tmp_path: Path, command: Command) -> None:
    words = "report", a_trace(tmp_path, b"no trace at all"), "--json"
    read, unread = command(*words, code=3), command(*words, "--no-traces", code=3)
    assert read.json["steps"][0]["traces"]["problems"]
    assert unread.json["steps"][0]["traces"] is None


def test_a_step_is_merged_into_one_timeline(tmp_path: Path, command: Command) -> None:
    step = a_run(tmp_path) / "step_000002"
    assert f"{step / 'timeline.json.gz'}: 1 event of 1 process" in command("merge", step).err
    assert command("merge", step, "--json", "-o", tmp_path / "other.json.gz").json["spans"] == 1
    assert (tmp_path / "other.json.gz").read_bytes() == (step / "timeline.json.gz").read_bytes()


def test_a_merge_of_broken_files_says_which_and_exits_with_3(tmp_path: Path, command: Command) -> None:
    step = a_trace(tmp_path, b"")
    out = command("merge", step, code=3).out
    assert "t.json: empty" in out
    assert "t.json: no" in out


def test_what_a_merge_was_asked_to_leave_out_is_said_and_is_no_defect(
    tmp_path: Path, command: Command
) -> None:
    step = a_run(tmp_path) / "step_000002"
    words = ("--from", "9", "--to", "10", "--roles", "trainer,actor", "--ranks", "0-7")
    printed = command("merge", step, *words)
    assert "1 spans outside" in printed.out
    assert "empty" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "5", "--to", "5"], "--to 5 is not after --from 5"),
        (["--from", "nan"], "nan"),
        (["--max-mb", "0"], "--max-mb is 0; give a size above 0"),
        (["--run", "other"], "holds nothing of run 'other'; it holds: run1"),
    ],
)
def test_an_option_of_merge_that_means_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    step = a_run(tmp_path) / "step_000002"
    assert run(["merge", str(step), *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (step / "timeline.json.gz").exists()


def test_merging_a_run_names_a_step_of_the_run_that_is_meant(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path, (1,), "old")
    a_run(tmp_path, (7,), "new", opened_ns=OPENED_NS + 10**12)
    for words, step in (([], 7), (["--run", "old"], 1)):
        assert f"such as --step {step}" in command("merge", tmp_path, *words, code=2).err
    command("merge", tmp_path, "--step", "7")
    assert (tmp_path / "step_000007" / "timeline.json.gz").exists()


def test_the_demo_without_its_libraries_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope_report.cli.demo.find_spec", lambda name: None)
    assert "torch 'stepscope[ray]'" in command("demo", code=2).err


def started(*arguments: str, stderr: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from stepscope_report.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    process = started("report", str(a_run(tmp_path, range(2, 40))))
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process, process.stderr as stderr:
        assert stderr.read() == b""
    assert process.returncode == BROKEN_PIPE


def test_a_bar_is_drawn_on_a_terminal_only(tmp_path: Path) -> None:
    a_run(tmp_path)
    terminal, end = pty.openpty()
    with started("report", str(tmp_path), "--json", stderr=end) as process:
        os.close(end)
        out, _ = process.communicate()
    assert b"reading spans" in os.read(terminal, 10_000)
    os.close(terminal)
    assert len(json.loads(out)["steps"]) == 2


@pytest.mark.slow
def test_names_that_the_terminals_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    driver.span("größe 大", 0, MS)
    driver.close(MS)
    folder.write()
    out, err = started("report", str(tmp_path), PYTHONIOENCODING="ascii").communicate()
    assert b"gr\\xf6\\xdfe \\u5927" in out
    assert "█ → 大".encode("ascii", errors="stepscope") == b"# -> \\u5927"
    assert err.startswith(b"Page: ")


def test_the_command_starts_without_torch_and_ray() -> None:
    code = (
        "import sys; from stepscope_report.cli import run; run(['--help']);"
        "print(sorted({'torch', 'ray', 'numpy', 'wrapt'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


# `stepscope ls` of one step's folder.


def test_a_steps_folder_shows_that_step_whatever_it_is_called(tmp_path: Path, command: Command) -> None:
    folder = StepFolder(tmp_path / "run", step=7)
    folder.process("trainer", owner=True).close(10 * MS)
    moved = folder.write().rename(tmp_path / "from the cluster")
    (row,) = command("ls", moved, "--json").json
    assert (row["step"], row["wall_ns"]) == (7, 10 * MS)


def test_a_step_in_which_nothing_says_its_number_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "copy" / "spans").mkdir(parents=True)
    assert "unknown number" in command("ls", tmp_path / "copy", code=2).err


def test_a_step_that_an_exception_ended_is_marked_with_it(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config = ProfileConfig(save_path=tmp_path, steps=[0, 1])
    with capture(0, config=config):
        pass
    with pytest.raises(ValueError, match="no prompt"), capture(1, config=config):
        raise ValueError("no prompt")
    flush()
    text = command("ls", tmp_path).out
    assert text.count("ended early") == 1
    assert "ValueError: no prompt" in text
    rows = command("ls", tmp_path, "--json").json
    assert [row["error"] for row in rows] == [None, "ValueError: no prompt"]
    text = command("report", tmp_path, "--no-html").out
    assert "yes, ended early" in text
    assert "ended early: ValueError: no" in text


def test_a_short_recording_of_an_engine_is_told_by_ls_the_report_and_its_page(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    note, ignored = (
        "9 of 50 engine iterations: the engine ran no more",
        {"iterations.count": "prefill was cut"},
    )
    engine = Expectation(name="replica 0", kind="engine", state="ok", notes=(note,), ignored=ignored)
    driver.expected.append(engine)
    driver.close(10 * MS)
    step = folder.write()
    shown = command("ls", tmp_path).out, command("report", step).out
    for text in (*shown, (step / "report.html").read_text()):
        assert f"replica 0: {note}" in text
        assert "iterations.count is" in text


# Pages that `stepscope report` leaves, and `stepscope diff`.


def test_a_report_leaves_a_page_in_each_step_and_one_for_the_run(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path)
    assert command("report", tmp_path / "step_000002").err == f"Page: {tmp_path}/step_000002/report.html\n"
    assert pages_of(tmp_path) == ["step_000002/report.html"]
    command("report", tmp_path)
    assert pages_of(tmp_path) == ["report.html", "step_000002/report.html", "step_000004/report.html"]
    assert "./step_000004/report.html" in (tmp_path / "report.html").read_text()


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


def test_one_step_is_reported_by_number_or_by_its_folder(tmp_path: Path, command: Command) -> None:
    a_run(tmp_path)
    by_number = command("report", tmp_path, "--step", "4").out
    assert command("report", tmp_path / "step_000004").out == by_number
    assert "Step 2" not in by_number
