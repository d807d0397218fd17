"""Conventions of the command line that hold for every command."""

from __future__ import annotations

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from packages.report.tests.commands import Command
from packages.report.tests.steps import MS
from stepscope.errors import BackendError
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import analyse
from stepscope_report.cli.app import app, run
from stepscope_report.timeline.readers import contract


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    """Return the folder of a run with the steps 2 to 5."""
    for step in range(2, 6):
        folder = StepFolder(tmp_path, step=step, run_id="run1")
        driver = folder.process("trainer", owner=True)
        driver.span("rollout", 0, 8 * MS, role="agent_loop")
        driver.close(10 * MS)
        folder.write()
    return tmp_path


def names() -> list[str]:
    group: Any = get_command(app)  # the types of its commands are typer's own
    return [
        *group.commands,
        *(
            f"{name} {inner}"
            for name in group.commands
            for inner in getattr(group.commands[name], "commands", ())
        ),
    ]


@pytest.mark.parametrize("verb", ["", *names()])
def test_every_command_has_a_short_help(verb: str, command: Command) -> None:
    help_text = command(*verb.split(), "-h").out
    assert "Usage: stepscope" in help_text
    assert verb in ("", "trigger") or ("--quiet" in help_text and "--verbose" in help_text)


@pytest.mark.parametrize(
    ("steps", "reported"), [("3", [3]), ("3-4", [3, 4]), ("2,4-", [2, 4, 5]), ("2:6:2", [2, 4])]
)
def test_steps_are_spelled_as_in_the_configuration(
    steps: str, reported: list[int], save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(save_path), "--step", steps, "--json", "--no-traces"]) == 0
    assert [step["step"] for step in json.loads(capsys.readouterr().out)["steps"]] == reported


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["report", "{}", "--step", "5-2"],
            "--step is '5-2'; allowed: ranges whose end is above their start",
        ),
        (["report", "{}", "--step", "8-"], "holds no step 8-. Captured: 2, 3, 4, 5"),
        (["merge", "{}", "--step", "2-3"], "--step 2-3: 2 steps, and a timeline is of one"),
        (["merge", "{}", "--step", "2", "--ranks", "first"], "--ranks is 'first'; allowed: 3, \"3-7\""),
        (["publish", "{}"], "Name it: --to tensorboard,wandb,mlflow,otel"),
        (["publish", "{}", "--to", "wandbb"], "--to is 'wandbb'; allowed: a writer: mlflow, otel, tensor"),
        (["report", "{}", "--step", "3,99"], "holds no step 99. Captured: 2, 3, 4, 5"),
        (["report", "{}", "--brief", "--json"], "--brief goes without --json"),
        (["report", "{}", "--markdown"], "--markdown needs --brief or --by"),
        (["report", "{}", "--run", "zzz"], "holds no step of run 'zzz'. Runs: run1"),
        (["diff", "{}", "{}", "--steps-b", "9"], "--steps-b is '9'; allowed: captured steps: 2, 3, 4, 5"),
        (["report", "{}", "--step", ""], "--step is ''"),
        (["report", "{}", "--jobs", "9" * 20], "from 1 to 1,024"),
        (["what-if", "{}", "--staleness", "x"], "'x'; allowed: whole"),
        (["trigger", "{}", "--wait", "nan"], "'nan'; allowed:"),
        (["trigger", "{}", "--next-run", "--wait", "0", "--expires", "1e300"], "expires_s is"),
        (["watch", "{}", "--every", "0", "--once"], "from 0.2"),
        pytest.param(
            ["demo", "{}/demo", "--engine", "nope"],
            "--engine is 'nope'",
            marks=pytest.mark.needs("torch", "ray"),
        ),
        (["trigger", "lst", "{}"], "there is no `stepscope trigger lst`: did you mean 'list'?"),
    ],
)
def test_a_wrong_one_is_refused_with_what_is_allowed(
    arguments: list[str], message: str, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([argument.format(save_path) for argument in arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [["merge", "{}", "--step", "2", "--output"], ["diff", "{}", "{}", "--fail-above", "5%", "--junit"]],
)
def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    arguments: list[str], save_path: Path, tmp_path: Path, command: Command
) -> None:
    taken = tmp_path / "a_folder"
    taken.mkdir()
    shown = command(*(word.format(save_path) for word in arguments), taken, code=1)
    assert f"{taken}: " in shown.err
    assert "Fix: " in shown.err
    assert list(tmp_path.glob(".*")) == []


def test_an_address_without_a_cluster_is_no_long_wait() -> None:
    pytest.importorskip("ray")
    from stepscope_report.cli.ray_nodes import check_reachable

    with socket.socket() as free, pytest.raises(OSError, match="refused"):
        free.bind(("127.0.0.1", 0))
        check_reachable(f"127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(ValueError, match="HOST:PORT"):
        check_reachable("nowhere")
    check_reachable("auto")


def test_merge_takes_a_range_of_ranks_without_an_end(
    save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["merge", str(save_path), "--step", "2", "--ranks", "0,3-7,8-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["selection"] == {"ranks": ["0", "3-7", "8-"]}


def test_a_quiet_command_prints_its_answer_and_errors_alone(save_path: Path, command: Command) -> None:
    printed = command("report", save_path, "-q")
    assert "Step 2 of" in printed.out
    assert printed.err == ""
    assert "does not exist" in command("report", save_path / "absent", "-q", code=2).err
    shown = command("report", save_path, "--no-html")
    assert "All tables: --full" in shown.err  # the next command is not quiet


def test_a_verbose_command_logs_at_debug_until_its_end(save_path: Path, command: Command) -> None:
    level = logging.getLogger("stepscope").level
    printed = command("report", save_path, "--step", "2", "-v").err
    assert f"debug: reading {save_path}/step_000002" in printed
    assert "debug: exit code 0" in printed
    assert logging.getLogger("stepscope").level == level


def test_an_unknown_variable_is_named_once_with_the_nearest_known_one(
    save_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_DISBALE", "1")
    monkeypatch.setenv("STEPSCOPE_TORCH__WITH_STACK", "true")
    assert run(["report", str(save_path), "--short", "--no-html"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    (warning,) = warnings
    assert re.findall(r"'(\w+)'", warning) == ["STEPSCOPE_DISBALE", "STEPSCOPE_DISABLE"]


def test_whole_numbers_that_javascript_would_round_are_texts_too(save_path: Path, command: Command) -> None:
    row = command("ls", save_path, "--json").json[0]
    assert row["opened_ns"] > 2**53
    assert row["opened_ns_text"] == str(row["opened_ns"])
    assert "wall_ns_text" not in row
    target = save_path / "timeline.json.gz"
    merged = command("merge", save_path, "--step", "2", "--json", "-o", target).json
    assert merged["window_ns_text"] == [str(ns) for ns in merged["window_ns"]]


def test_the_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    words = {"_STEPSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "stepscope tr", "COMP_CWORD": "1"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert command().out.split() == ["trigger"]


# `stepscope analyse`: finds what waits, does each, and says what failed.


class Raw:
    """Recordings are files that end in `.raw`; one that says `broken` cannot be analysed."""

    name = "raw"

    def waiting(self, folder: Path) -> list[Path]:
        return [path for path in sorted(folder.rglob("*.raw")) if not path.with_suffix(".json").exists()]

    def analyse(self, recording: Path, timeout_s: float) -> str:
        if recording.read_text() == "broken":
            raise BackendError(f"took longer than {timeout_s:g} s")
        recording.with_suffix(".json").write_text("[]")
        return "one file"


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(analyse, "installed_analysers", lambda: [Raw()])
    made = StepFolder(tmp_path)
    made.process("actor", 0, owner=True).close(1000)
    root = made.write()
    (root / "traces").mkdir()
    (root / "traces" / "a.raw").write_text("sound")
    return root


def test_what_waits_is_analysed_once(step: Path, command: Command) -> None:
    assert "a.raw: one file" in command("analyse", step.parent).err
    assert (step / "traces" / "a.json").exists()
    assert "no recording waits" in command("analyse", step).err


def test_one_that_fails_is_named_and_the_others_go_on(step: Path, command: Command) -> None:
    (step / "traces" / "0.raw").write_text("broken")
    message = command("analyse", step, "--timeout", "7", code=3).err
    assert "0.raw: FAILED: " in message
    assert "a.raw: one file" in message


def test_without_an_analyser_it_says_what_to_install(
    step: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(analyse, "installed_analysers", list)
    assert "install 'stepscope[npu]'" in command("analyse", step, code=2).err


@pytest.mark.parametrize("name", ["trace_view.json", "ascend_pytorch_profiler_0.db"])
def test_a_recording_of_an_npu_names_the_package_that_reads_it(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(contract, "_points", lambda *_: ())
    path = tmp_path / "host_71_ascend_pt" / "ASCEND_PROFILER_OUTPUT" / name
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    for given in (tmp_path, path.parent):
        assert f"{name}: of an NPU: pip install 'stepscope[npu]'" in command("report", given, code=1).err
