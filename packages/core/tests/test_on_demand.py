"""Captures on demand: what is asked for through `control.json` or a signal, heard where a step begins.

One file above 400 lines: who asks, who hears and the command share the run and its listener.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.core.tests.runs import at_once, handling, manifest_of, python, step_of, until
from packages.report.tests.commands import Command
from stepscope import ProfileConfig, capture, request_capture
from stepscope._recording.capture import configure as run_module
from stepscope._recording.capture import on_demand
from stepscope._recording.process import identity
from stepscope.config import RoleConfig
from stepscope.errors import CaptureError, ConfigError, RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.requests import (
    Answer,
    Listening,
    answers_by_now,
    claim_step,
    has_died,
    read_listening,
    read_requests,
)
from stepscope_report.cli.app import run


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    """Return a configuration that captures on demand alone, with a thread that polls too rarely to matter."""
    return ProfileConfig(save_path=str(tmp_path / "run"), control={"poll_seconds": 3600})


@pytest.fixture(autouse=True)
def no_listener_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(on_demand, "_listener", None)
    yield
    if on_demand._listener is not None:
        on_demand._listener.close()


def steps_of(config: ProfileConfig) -> list[int]:
    return list(RunLayout(config.save_path).steps())


def train(config: ProfileConfig, steps: range) -> None:
    for step in steps:
        with capture(step, config=config):
            pass


def listening() -> on_demand.Listener:
    assert on_demand._listener is not None
    return on_demand._listener


def answer(request: str) -> Answer:
    return listening()._answers[request]


def ask(config: ProfileConfig, steps: str = "next", *, next_run: bool = True, **other: object) -> str:
    return request_capture(steps, save_path=config.save_path, next_run=next_run, **other)  # type: ignore[arg-type]  # as tests give it


# Asking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "changes", "before", "captured", "state"),
    [
        ({"steps": "next"}, {}, 3, [3], "captured"),
        ({"steps": "2:7:2"}, {}, 0, [2, 4, 6], "captured"),
        ({"steps": "2"}, {"steps": [2]}, 0, [2], "captured"),
        ({"steps": "next", "expires_s": -1}, {}, 0, [], "expired"),
        ({"steps": "next"}, {"control": {"requests": False}}, 0, [], None),
    ],
    ids=["next", "range", "selected too", "expired", "off"],
)
def test_the_steps_that_are_asked_for_are_captured_once(
    asked: dict[str, Any], changes: dict[str, Any], before: int, captured: list[int],
    state: str | None, config: ProfileConfig,
) -> None:  # fmt: skip
    config = config.replace(**changes)
    train(config, range(before))
    request = ask(config, **asked)
    train(config, range(before, 9))
    assert steps_of(config) == captured
    if state:
        assert answer(request).state == state


@pytest.mark.parametrize("steps", ["0", "3,4", "1:9:3"])
def test_steps_that_the_run_has_begun_are_refused_at_once(steps: str, config: ProfileConfig) -> None:
    train(config, range(5) if steps != "1:9:3" else range(8))
    with pytest.raises(ConfigError) as refused:
        ask(config, steps)
    assert refused.value.field == "steps"
    assert refused.value.value == steps
    assert not RunLayout(config.save_path).control.exists()


@pytest.mark.parametrize(
    ("at", "asked", "is_refused"),
    [
        ([7, 3], "5", False),
        ([7, 5], "5", True),
        ([7, None], "5", False),
        ([7, 5], "4-8", False),
        ([7, 5], "next", False),
    ],
    ids=["one can", "all are past", "one has not begun", "some are to come", "next"],
)
def test_a_step_is_refused_if_no_process_can_capture_it(
    at: list[int | None], asked: str, is_refused: bool, config: ProfileConfig
) -> None:
    listen(config, at)
    if is_refused:
        with pytest.raises(ConfigError):
            ask(config, asked)
    else:
        assert ask(config, asked)


def test_a_resumed_run_is_asked_for_steps_that_the_ended_one_had_passed(config: ProfileConfig) -> None:
    listen(config, [90], ended_ns=1)
    listen(config, [40], first_pid=9)
    assert ask(config, "60", next_run=False)
    with pytest.raises(ConfigError):
        ask(config, "30", next_run=False)


def listen(
    config: ProfileConfig, at: list[int | None], first_pid: int = 1, ended_ns: int | None = None
) -> None:
    """Write the files of processes on another host that listen, each at a step."""
    layout = RunLayout(config.save_path)
    layout.listeners.mkdir(parents=True, exist_ok=True)
    for pid, step in enumerate(at, first_pid):
        process = Listening(
            host="elsewhere",
            pid=pid,
            role="t",
            rank=0,
            since_ns=1,
            step=step,
            run_id="0a0b0c0d",
            ended_ns=ended_ns,
        )
        layout.listener("elsewhere", pid).write_bytes(msgspec.json.encode(process))


def test_roles_ranks_and_seconds_hold_for_the_requested_step_alone(config: ProfileConfig) -> None:
    ask(config, roles="rollout", ranks=[0, 8], seconds=5)
    first = capture(0, config=config)
    assert {role: settings.ranks for role, settings in first.config.roles.items()} == {"rollout": (0, 8)}
    assert first.config.budget.seconds == 5
    second = capture(1, config=config)
    assert not second.selected
    assert second.config is config


def test_what_is_asked_wrongly_is_a_config_error_and_nothing_is_written(config: ProfileConfig) -> None:
    with pytest.raises(ConfigError, match="steps is 'soon'"):
        ask(config, "soon")
    with pytest.raises(ConfigError, match=r"ranks is \[\]"):
        ask(config, ranks=[])
    with pytest.raises(ConfigError, match=r"budget.seconds is -1"):
        ask(config, seconds=-1)
    with pytest.raises(ConfigError, match=r"tool is 'perf'"):
        ask(config, tool="perf")
    with pytest.raises(ConfigError, match="steps is ''"):
        ask(config, "")
    for roles in ("", "x" * 999):
        with pytest.raises(ConfigError, match="roles is '"):
            ask(config, roles=roles)
    with pytest.raises(ConfigError, match="expires_s is nan"):
        ask(config, expires_s=float("nan"))
    with pytest.raises(RecordError):
        ask(config, ranks=list(range(30_000)))
    assert not RunLayout(config.save_path).control.exists()


def test_two_requests_at_once_are_both_kept(config: ProfileConfig) -> None:
    at_once(8, lambda step: ask(config, str(step)))
    requests = read_requests(RunLayout(config.save_path).control)
    assert {request.steps for request in requests} == set("01234567")


# Hearing ----------------------------------------------------------------------------------------------------


def test_a_tool_that_is_not_installed_is_refused_and_training_goes_on(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: ProfileConfig) -> None:
        raise ConfigError("tool", "nsys", "an installed backend: torch", "pip install it")

    request = ask(config, tool="nsys")
    monkeypatch.setattr(on_demand, "check_tool", missing)
    train(config, range(2))
    assert answer(request).state == "refused"
    assert "an installed backend" in str(answer(request).reason)
    assert steps_of(config) == []


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tool": "nsys"}, "nsys did not start this process"),
        ({"tool": "cuda_memory"}, "cuda_memory trace: failed|torch is not imported"),
        ({"ranks": [7]}, r"no profiler ran: rank 0 is not in roles\.\*\.ranks \[7\]"),
        (
            {"roles": "nobody"},
            "roles.nobody matched nothing|no pattern in roles matches role 'trainer'",
        ),
    ],
    ids=["nsys", "cuda_memory", "ranks", "roles"],
)
def test_a_capture_that_failed_or_recorded_nothing_says_why(
    asked: dict[str, object], why: str, config: ProfileConfig
) -> None:
    request = ask(config, **asked)  # type: ignore[arg-type]  # as tests give it
    for step in range(2):
        with capture(step, config=config, rank=0):
            pass
    assert answer(request).steps == [0]
    assert re.search(rf"^step 0: .*({why})", str(answer(request).reason))


def test_a_capture_that_was_to_hold_spans_alone_is_answered_without_a_reason(
    config: ProfileConfig,
) -> None:
    spans_alone = msgspec.structs.replace(config, roles={"*": RoleConfig(profiler=False)})
    request = ask(spans_alone)
    train(spans_alone, range(2))
    assert answer(request).steps == [0]
    assert answer(request).reason is None


def test_a_capture_that_cannot_be_opened_says_why(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("save_path", "x", "a folder", "choose another")

    monkeypatch.setattr(run_module, "check", refuse)
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    request = ask(config)
    train(config, range(2))
    assert "ConfigError: save_path" in str(answer(request).reason)


def test_a_cancelled_request_is_forgotten(config: ProfileConfig) -> None:
    request = ask(config, "4")
    train(config, range(2))
    assert run(["trigger", "cancel", config.save_path, request]) == 0
    train(config, range(2, 6))
    assert steps_of(config) == []


def test_only_open_requests_are_taken_back(config: ProfileConfig, command: Command) -> None:
    config = config.replace(control={"poll_seconds": 0.02})
    ended = [ask(config, "next"), ask(config, "1"), ask(config, "7", expires_s=-1)]
    begun, ahead = ask(config, "2:9:3"), ask(config, "5")
    train(config, range(4))
    until(lambda: answer_of(config, begun).steps == [2])
    status = command("trigger", "cancel", config.save_path, "all", "--json").json
    assert [(asked["id"], asked["steps"]) for asked in status["requests"]] == [
        *zip(ended, ("next", "1", "7"), strict=True),
        (begun, "2"),
    ]
    assert command("trigger", "cancel", config.save_path, ended[1], code=3).out
    train(config, range(4, 9))
    assert steps_of(config) == [0, 1, 2]
    kept = command("trigger", "list", config.save_path, "--json", code=3).json["listening"][0]["answers"]
    assert {name: answer["steps"] for name, answer in kept.items()} == {
        ended[0]: [0], ended[1]: [1], ended[2]: [], begun: [2]
    }  # fmt: skip
    assert ahead not in kept


def test_ranks_that_each_open_captures_agree_on_the_next_step(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "is_alone", lambda: False)
    ask(config)
    first = on_demand.Listener(config, identity.identify("actor", rank=0))
    second = on_demand.Listener(config, identity.identify("actor", rank=1))
    seen = [
        [listener.wanted(config, step, alone=False) is not None for listener in (first, second)]
        for step in (4, 5, 6)
    ]
    for listener in (first, second):
        listener.close()
    assert seen == [[False, False], [True, True], [False, False]]


def test_the_thread_makes_the_folder_by_which_who_asks_knows_the_run(config: ProfileConfig) -> None:
    train(config, range(3))
    assert not read_listening(RunLayout(config.save_path))
    listening()._write()
    (process,) = read_listening(RunLayout(config.save_path))
    assert (process.pid, process.step) == (os.getpid(), 2)


@pytest.mark.parametrize(("error", "failed"), [(ValueError("a rank"), True), (KeyboardInterrupt(), False)])
def test_a_process_that_a_ctrl_c_ends_has_not_failed(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch, error: BaseException, failed: bool
) -> None:
    train(config, range(1))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    listening()._write()
    listening().write_last("it ended")
    (process,) = read_listening(RunLayout(config.save_path))
    assert (process.failed, has_died(process)) == (failed, failed)


def test_the_thread_answers_between_two_steps(config: ProfileConfig) -> None:
    train(config.replace(control={"poll_seconds": 0.02}), range(1))
    request = ask(config)
    until(lambda: any(request in process.answers for process in read_listening(RunLayout(config.save_path))))
    (process,) = read_listening(RunLayout(config.save_path))
    assert (process.pid, process.step, process.answers[request].state) == (os.getpid(), 0, "heard")


SIGNAL = "os.kill(os.getpid(), signal.SIGUSR1)"


@pytest.mark.parametrize(
    ("early", "in_step_1", "captured"),
    [
        ("", SIGNAL, 2),
        (f"stepscope.configure(config)\n{SIGNAL}", "pass", 0),
        (f"stepscope.prepare(config=config)\n{SIGNAL}", "pass", 0),
    ],
    ids=["in a step", "after configure", "after prepare"],
)
def test_a_signal_captures_the_next_step_of_this_process(
    early: str, in_step_1: str, captured: int, tmp_path: Path
) -> None:
    program = f"""
import os, signal, sys, stepscope
config = stepscope.ProfileConfig(save_path=sys.argv[1], control={{"poll_seconds": 3600}})
{early}
for step in range(4):
    with stepscope.capture(step, config=config):
        if step == 1:
            {in_step_1}
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=True)
    assert list(RunLayout(tmp_path / "run").steps()) == [captured]


def test_who_is_off_dies_of_the_signal_as_ever(tmp_path: Path) -> None:
    program = """
import os, signal, sys, stepscope
stepscope.configure(save_path=sys.argv[1], control={"requests": False})
os.kill(os.getpid(), signal.SIGUSR1)
"""
    python(program, tmp_path / "run", status=-signal.SIGUSR1)


def test_a_handler_that_python_does_not_know_of_stays(tmp_path: Path) -> None:
    program = """
import faulthandler, os, signal, sys, stepscope
faulthandler.register(signal.SIGUSR1)
stepscope.configure(save_path=sys.argv[1])
os.kill(os.getpid(), signal.SIGUSR1)
"""
    assert "recent call first" in python(program, tmp_path / "run")


@pytest.mark.needs("ray")
def test_a_worker_that_took_part_survives_the_signal(
    config: ProfileConfig, remote: Callable[..., Any]
) -> None:
    import ray

    class Worker:
        def signalled(self) -> int:
            os.kill(os.getpid(), signal.SIGUSR1)
            return os.getpid()

    worker = remote(Worker)
    with capture(7, workers={"actor": worker}, config=config.replace(steps=[7])):
        pass
    assert ray.get(worker.signalled.remote()) == ray.get(worker.signalled.remote())


def test_a_handler_of_the_users_stays(config: ProfileConfig) -> None:
    heard: list[int] = []
    with handling(signal.SIGUSR1, lambda number, _: heard.append(number)):
        train(config, range(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        train(config, range(1, 3))
    assert heard == [signal.SIGUSR1]
    assert steps_of(config) == []


@pytest.mark.needs("ray")
def test_the_workers_of_a_requested_step_take_part(config: ProfileConfig, remote: Callable[..., Any]) -> None:
    class Worker:
        def update(self) -> int:
            return 1

    ask(config, ranks="all")
    with capture(7, workers={"actor": [remote(Worker), remote(Worker)]}, config=config):
        pass
    manifest = manifest_of(step_of(config, 7))
    assert sorted(part.process.role for part in manifest.processes) == ["actor", "actor", "trainer"]


# Hostile files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"format": 1, "requests": [{"id": "../../etc", "steps": "next"}]}',
        b'{"format": 1, "requests": [], "command": "rm -rf /"}',
        b'{"format": 2, "requests": []}',
        b"[" * 70_000,
        b'{"format": 1, "requests": ["' + b"x" * 70_000 + b'"]}',
        b"\xff\xfe\x00",
    ],
    ids=["empty", "half", "path", "unknown key", "other format", "deep", "large", "no text"],
)
def test_a_hostile_or_half_written_file_is_refused_whole(content: bytes, config: ProfileConfig) -> None:
    control = RunLayout(config.save_path).control
    control.parent.mkdir()
    control.write_bytes(content)
    with pytest.raises(RecordError, match=r"control\.json"):
        read_requests(control)
    train(config, range(2))
    assert steps_of(config) == []
    request = ask(config)  # and fixed by the next one who asks
    train(config, range(2, 4))
    assert answer(request).state == "captured"


@given(st.binary(max_size=300))
def test_no_content_makes_the_training_loop_fail(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("run") / "control.json"
    file.write_bytes(content)
    try:
        read_requests(file)
    except RecordError:
        pass


def test_a_claim_that_is_no_number_is_not_believed(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert claim_step(layout, "0a0b0c0d", 5) == 5
    assert claim_step(layout, "0a0b0c0d", 9) == 5
    layout.claimed("0a0b0c0d").write_text("-7; rm")
    assert claim_step(layout, "0a0b0c0d", 9) == 9


# The command ------------------------------------------------------------------------------------------------


def test_the_command_says_who_heard(config: ProfileConfig, command: Command) -> None:
    train(config.replace(control={"poll_seconds": 0.02}), range(3))
    until(lambda: read_listening(RunLayout(config.save_path)) != [])
    shown = command("trigger", config.save_path, "--steps", "9", "--roles", "actor", "--wait", "20")
    assert "asked: request" in shown.err
    assert "heard" in shown.out
    assert "roles actor" in shown.out
    assert f"pid {os.getpid()}, at step 2" in shown.out


@pytest.mark.parametrize("words", ["{} --wait 0", "ask {} --wait 0", "list {}", "cancel {} all"])
def test_no_such_run_is_a_usage_error_and_nothing_is_made(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").mkdir()
    assert run(["trigger", *words.format(tmp_path / "profiel").split()]) == 2
    assert f"{tmp_path} holds: profile" in capsys.readouterr().err
    assert not (tmp_path / "profiel").exists()


@pytest.mark.slow
def test_a_run_that_has_just_begun_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = threading.Timer(0.3, (tmp_path / "run").mkdir)
    begun.start()
    assert run(["trigger", str(tmp_path / "run"), "--wait", "1"]) == 3
    begun.join()
    assert "nobody listens in" in capsys.readouterr().err


def test_a_request_that_is_missed_exits_with_3_and_says_why(config: ProfileConfig, command: Command) -> None:
    train(config.replace(control={"poll_seconds": 0.02}), range(5))
    until(lambda: read_listening(RunLayout(config.save_path)) != [])
    request = ask(config, "5:9:3")
    train(config.replace(control={"poll_seconds": 0.02}), range(9, 10))
    until(lambda: answer_of(config, request).state == "missed")
    assert "step 9 was reached" in command("trigger", "list", config.save_path, code=3).out


def test_who_asks_for_what_is_missed_exits_with_3(config: ProfileConfig) -> None:
    Path(config.save_path).mkdir()
    listener = on_demand.Listener(config.replace(control={"poll_seconds": 0.02}), identity.identify("actor"))
    try:
        assert run(["trigger", config.save_path, "--expires", "-1", "--wait", "20"]) == 3
    finally:
        listener.close()


def test_the_status_is_0_while_a_request_may_still_be_captured_and_3_once_it_is_over(
    config: ProfileConfig, command: Command
) -> None:
    ask(config, "5")
    assert "UTC" in command("trigger", "list", config.save_path).out  # as `ls` says when a capture was opened
    ask(config, "6", expires_s=-1)
    assert "no process heard" in " ".join(command("trigger", "list", config.save_path, code=3).out.split())


def test_an_answer_expires_with_its_request_whatever_its_process_does(config: ProfileConfig) -> None:
    layout = RunLayout(config.save_path)
    request = ask(config, "5", expires_s=-1)
    heard = Listening(
        host="elsewhere",
        pid=1,
        role="t",
        rank=0,
        since_ns=1,
        step=3,
        answers={request: Answer(state="heard")},
    )
    now = answers_by_now(heard, read_requests(layout.control))
    assert now.answers[request].state == "expired"


def test_no_poll_undoes_the_last_answers_of_a_process_that_exits(config: ProfileConfig) -> None:
    config = config.replace(control={"poll_seconds": 0.001})
    train(config, range(1))
    request = ask(config, "9")
    until(lambda: request in listening()._answers)
    on_demand._end_at_exit()
    time.sleep(0.1)  # a hundred polls, if any
    assert answer_of(config, request).state == "missed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("", "the process exited before such a step began"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "terminated (SIGTERM) before such a step began"),
        ("os._exit(0)", "its process ended before such a step began"),
    ],
    ids=["exit", "sigterm", "killed"],
)
def test_what_a_process_heard_is_missed_once_it_has_ended(
    end: str, why: str, config: ProfileConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"""
import os, signal, sys, stepscope
from pathlib import Path
config = stepscope.configure(save_path=sys.argv[1], control={{"poll_seconds": 0.01}}, steps=[0])
for step in range(3):
    with stepscope.capture(step):
        while not any(b'"heard"' in file.read_bytes() for file in Path(sys.argv[1]).glob("control/*.json")):
            pass
{end}
"""
    request = ask(config, "9")
    subprocess.run([sys.executable, "-c", program, config.save_path], check=False, timeout=60)
    assert run(["trigger", "list", config.save_path, "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)["listening"][0]["answers"][request]
    assert answer["state"] == "missed"
    assert why in answer["reason"]


def answer_of(config: ProfileConfig, request: str) -> Answer:
    (listening,) = read_listening(RunLayout(config.save_path))
    return listening.answers.get(request, Answer(state="heard"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [("cancel {} 00000000", 2, "one of: {}"), ("{} --ranks 8,8 --wait 0", 2, "each rank once")],
)
def test_a_wrong_request_is_a_usage_error(
    words: str, code: int, message: str, config: ProfileConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ask(config, "5:8")
    assert run(["trigger", *words.format(config.save_path).split()]) == code
    assert message.format(request) in capsys.readouterr().err
    assert run(["trigger", "list", config.save_path, "--json"]) == 0
    assert [asked["steps"] for asked in json.loads(capsys.readouterr().out)["requests"]] == ["5-7"]


# A run that has ended ---------------------------------------------------------------------------------------


def end_a_run(config: ProfileConfig, *, killed: bool = False) -> None:
    """A run in another process that listened, and is over."""
    program = f"""
import glob, os, sys, time, stepscope
config = stepscope.configure(save_path=sys.argv[1], control={{"poll_seconds": 0.01}})
with stepscope.capture(0): pass
while not glob.glob(sys.argv[1] + "/control/*.json"): time.sleep(0.001)
{"os._exit(0)" if killed else ""}
"""
    subprocess.run([sys.executable, "-c", program, config.save_path], check=True, timeout=60)


@pytest.mark.parametrize("killed", [False, True], ids=["exited", "killed"])
def test_a_request_to_a_run_that_has_ended_is_refused_and_the_next_run_hears_nothing(
    killed: bool, config: ProfileConfig, command: Command
) -> None:
    end_a_run(config, killed=killed)
    shown = command("trigger", config.save_path, "--wait", "0", code=3)
    assert "has ended (trainer," in shown.err
    assert "trigger --next-run" in shown.err
    assert "Listening" not in shown.out
    train(config, range(2))
    assert steps_of(config) == []


def test_a_request_in_python_to_a_run_that_has_ended_is_refused(config: ProfileConfig) -> None:
    end_a_run(config)
    with pytest.raises(CaptureError, match="next_run=True"):
        ask(config, next_run=False)
    assert not RunLayout(config.save_path).control.exists()
    assert run(["trigger", config.save_path, "--wait", "0", "--next-run"]) == 0
    train(config, range(2))
    assert steps_of(config) == [0]


def test_what_a_run_left_unanswered_is_not_the_next_ones(config: ProfileConfig) -> None:
    """A request for a later step, and the run ends before it."""
    listen(config, [3])
    ask(config, "5")
    train(config, range(7))
    assert steps_of(config) == []
