"""Flight recorder: spans of uncaptured steps stay in memory, and a trigger writes them as steps.

One file above 400 lines, because all cases share the loop and the readers of what it leaves.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import json
import os
import re
import signal
import threading
import time
import traceback
import tracemalloc
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from rich.console import Console
from torch._utils import ExceptionWrapper
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure
from torch.multiprocessing.spawn import ProcessRaisedException

from packages.core.tests.runs import at_once, manifest_of, python, ranks, standing_recorder, until
from packages.report.tests.commands import Command
from stepscope import (
    ProfileConfig,
    attach,
    capture,
    carrier,
    profile_step,
    request_capture,
    span,
    step_tokens,
    trajectory,
)
from stepscope._recording.capture import on_demand
from stepscope._recording.process import shutdown
from stepscope._recording.process.failures import describe
from stepscope._recording.recorder import standing, steps, write
from stepscope._recording.recorder.ring import SPAN_BYTES, Ring
from stepscope._recording.recorder.steps import FIRST, RecordedStep
from stepscope._recording.spans import lines, slot
from stepscope.engines import passes
from stepscope.engines.torch_inprocess import TorchRolloutProfiler
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest import Ending
from stepscope.files.manifest_parts import read_parts
from stepscope.files.requests import read_requests
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.steps import StepLine, read_step_lines
from stepscope.testing.backend_conformance import in_child
from stepscope_report import StepReport, step_report
from stepscope_report.cli import run
from stepscope_report.html.step_page import render_step
from stepscope_report.terminal import render
from stepscope_report.timeline import load_step

pytestmark = [pytest.mark.usefixtures("one_recorder"), pytest.mark.slow]

SPANS_ALONE = {"*": {"profiler": "off"}}
SETTINGS = {"record": "spans", "roles": SPANS_ALONE, "control": {"poll_seconds": 0.05}}


def config_in(folder: Path, recorder: Mapping[str, object] = {}, **settings: object) -> ProfileConfig:
    settings["recorder"] = recorder
    return ProfileConfig.from_mapping({"save_path": str(folder), **SETTINGS, **settings})


def steps_of(config: ProfileConfig, seconds: dict[int, float], number: int) -> dict[int, tuple[float, float]]:
    """Run steps 0 to `number`. Return the begin and end of each by the monotonic clock."""
    times = {}
    for step in range(number):
        with capture(step, config=config):
            began = time.monotonic()
            with span("generate", role="rollout"):
                time.sleep(seconds.get(step, 0.005))
            times[step] = (began, time.monotonic())
    return times


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return {step: seconds} that the recorder takes for the lengths of steps; 0.005 s for all others.

    A busy machine makes steps slow that the test did not.
    """
    seconds: dict[int, float] = {}
    monkeypatch.setattr(
        RecordedStep, "dur_ns", property(lambda step: round(seconds.get(step.number, 0.005) * 1e9))
    )
    return seconds


def drained(folder: Path) -> RunLayout:
    recorder = standing_recorder()
    assert recorder.drain(30)
    recorder.is_hurried = False
    return RunLayout(folder)


def written_on_request(folder: Path) -> RunLayout:
    """Ask for the last step, and return the folder of the run once the step is written."""
    request_capture(last=1, save_path=folder)
    until(lambda: RunLayout(folder).steps())
    return drained(folder)


def holds(whole_ns: int, part_s: float) -> bool:
    """Return whether a time holds a part of it that another clock call measured, and hardly more."""
    return 0 <= whole_ns - 1e9 * part_s + 1e3 < 2e8


def report_of(layout: RunLayout, step: int) -> StepReport:
    return step_report(load_step(layout.step(step).root))


def text_of(report: StepReport) -> str:
    out = StringIO()
    Console(file=out, width=200).print(render(report))
    return out.getvalue()


def lines_of(layout: RunLayout) -> list[StepLine]:
    (file,) = layout.root.glob("steps_*.jsonl")
    return read_step_lines(file)


def test_a_slow_step_is_written_with_the_one_before_it(tmp_path: Path, lengths: dict[int, float]) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "slow_factor": 12})
    lengths[15] = 0.3
    times = steps_of(config, lengths, 17)
    layout = drained(tmp_path)
    assert list(layout.steps()) == [14, 15]
    manifest = manifest_of(layout.step(15))
    assert manifest.problems() == []
    assert manifest.state == "ok"
    assert manifest.recorder is not None
    assert manifest.recorder.trigger == "slow"
    assert "of 15 steps" in manifest.recorder.reason
    report = report_of(layout, 15)
    began, ended = times[15]
    assert holds(report.breakdown.window_ns, ended - began)
    (generate, _) = report.breakdown.lines
    assert (generate.role, generate.stage) == ("rollout", "generate")
    assert 3e8 <= generate.wall_ns <= report.breakdown.window_ns
    assert report.health.complete


def test_the_rank_whose_step_was_slow_is_named(tmp_path: Path, lengths: dict[int, float]) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "last": 1, "slow_factor": 12})
    lengths[13] = 0.3
    for step in range(14):
        with capture(step, config=config, rank=3, role="actor"):
            pass
    recorder = manifest_of(drained(tmp_path).step(13)).recorder
    assert recorder is not None
    assert recorder.reason.startswith("step 13 of actor ")
    assert "rank 3: it took 3" in recorder.reason


def test_its_report_and_ls_speak_of_a_recorder_and_not_of_a_capture(
    tmp_path: Path, command: Command, lengths: dict[int, float]
) -> None:
    lengths[15] = 0.3
    steps_of(config_in(tmp_path, recorder={"then_capture": 0, "slow_factor": 12}), {15: 0.3}, 20)
    layout = drained(tmp_path)
    timeline = load_step(layout.step(15).root)
    report = step_report(timeline)
    text = text_of(report)
    assert "(slow: step 15: it" in text
    assert "longer than any" in text
    assert "19 uncaptured steps" not in text  # the step itself and the first one do not compare
    assert re.search(r"18 uncaptured steps .*\(1-14, 16-19\)", text)
    assert "the capture cost" not in text
    assert "opening and closing" not in text
    assert "not-typical" not in {advice.rule for advice in report.advice}  # the cause is known
    assert "flight recorder" in render_step(timeline, report)
    rows = command("ls", tmp_path, "--json").json
    assert [row["recorder"]["trigger"] for row in rows] == ["slow", "slow"]


def test_the_first_steps_are_never_slow(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path), {FIRST - 1: 0.1}, FIRST)
    assert drained(tmp_path).steps() == {}


def test_a_trigger_writes_so_often_in_a_run(tmp_path: Path, lengths: dict[int, float]) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "per_trigger": 2, "last": 1, "slow_factor": 12})
    lengths.update({12: 0.1, 16: 1.5, 20: 30.0})
    steps_of(config, {}, 25)
    assert list(drained(tmp_path).steps()) == [12, 16]


def test_a_cause_that_returns_is_written_once(tmp_path: Path, lengths: dict[int, float]) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "last": 1, "slow_factor": 12})
    lengths.update(dict.fromkeys((2, 12, 22, 32, 42, 43), 0.3))
    for step in range(45):
        with capture(step, config=config):
            with span("update", role="actor"):
                time.sleep(0.01)
            if step % 10 == 2:
                with span("save_checkpoint", role="trainer"):
                    time.sleep(0.3)
            if step == 43:
                with span("hiccup", role="trainer"):
                    time.sleep(0.3)
    layout = drained(tmp_path)
    assert list(layout.steps()) in ([12, 43], [43])
    report = report_of(layout, 43)
    assert report.baseline is not None
    assert not report.baseline.alike


def test_a_slow_step_of_a_short_kind_is_found_beside_a_longer_kind(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "last": 1, "slow_factor": 8})
    for step in range(40):
        with capture(step, config=config):
            with span("update", role="actor"):
                time.sleep(0.2 if step == 36 else 0.01)
            if step % 4:
                with span("generate", role="rollout"):
                    time.sleep(0.15)
        drained(tmp_path)  # the stages of the steps before are known
    layout = drained(tmp_path)
    assert list(layout.steps()) == [36]
    recorder = manifest_of(layout.step(36)).recorder
    assert recorder is not None
    assert "of 9 steps" in recorder.reason


def test_a_step_is_compared_with_those_of_its_kind(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"triggers": []}, steps=[22, 24])
    for step in range(36):
        with capture(step, config=config):
            with span("update", role="actor"):
                time.sleep(0.01)
            if step % 4 == 0:
                with span("generate", role="rollout"):
                    time.sleep(0.06)
    layout = drained(tmp_path)
    for step in (22, 24):
        baseline = report_of(layout, step).baseline
        assert baseline is not None
        assert baseline.alike
        same = {other for other in range(1, 36) if (other % 4 == 0) == (step % 4 == 0)} - {22, 24}
        assert set(baseline.steps) <= same
        assert len(baseline.steps) >= len(same) - 2  # the first after a capture is left out
    (of_generation,) = (line for line in lines_of(layout) if line.step == 24)
    assert of_generation.captured
    assert set(of_generation.stages) == {"actor/update", "rollout/generate"}


def test_a_trigger_that_is_not_listed_writes_nothing(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path, recorder={"triggers": ["hang"]}), {15: 0.3}, 17)
    assert drained(tmp_path).steps() == {}


def test_the_step_after_a_slow_one_is_captured_on_request(tmp_path: Path, lengths: dict[int, float]) -> None:
    config = config_in(tmp_path, recorder={"slow_factor": 12, "then_capture": 1})
    lengths[15] = 0.5
    for step in range(100):
        with capture(step, config=config):
            time.sleep(0.01)
        if step > 15 and len(RunLayout(tmp_path).steps()) > 2:
            break
    layout = drained(tmp_path)
    _, slow, captured = layout.steps()
    assert slow == 15
    (request,) = read_requests(layout.control)
    assert request.because == "step 15 was slow"
    assert manifest_of(layout.step(captured)).recorder is None


def test_an_exception_that_leaves_a_step_writes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_in(tmp_path)
    steps_of(config, {}, 3)
    with (
        pytest.raises(ValueError, match="boom"),
        capture(3, config=config),
        span("update", role="actor"),
    ):
        raise ValueError("boom\n\tclass_name: Trainer")
    layout = drained(tmp_path)
    assert "step 3 is on record (exception: step 3: ValueError: boom): stepscope report" in caplog.text
    assert list(layout.steps()) == [2, 3]
    report = report_of(layout, 3)
    assert report.health.user_error == "ValueError: boom"
    assert [row.error for row in report.health.errors] == ["ValueError: boom"]
    assert "(exception: step 3: ValueError: boom). " in text_of(report)
    assert "ended early: ValueError" in text_of(report)
    assert lines_of(layout)[-1].error == "ValueError: boom"


def test_a_long_text_of_an_exception_is_cut_between_words() -> None:
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    text = describe(RuntimeError("word " * 99))
    assert len(text) <= 200
    assert text.endswith(" word...")


def test_an_error_that_carries_the_user_s_one_is_told_as_the_user_s() -> None:
    boom = ValueError("boom\nmore")
    of_ray: Any = RayTaskError
    of_torch: Any = ExceptionWrapper
    task = of_ray("f", "ray::f() (pid=1, ip=a)\nValueError: boom", boom, "ray::f", 1, "a")
    outer = of_ray("g", "ray::g()", task.as_instanceof_cause(), "ray::g", 2, "a")
    for error in (task, task.as_instanceof_cause(), outer):
        assert describe(error) == "ValueError: boom"
    try:
        raise boom
    except ValueError:
        in_worker, trace = of_torch(where="in DataLoader worker process 0"), traceback.format_exc()
    with pytest.raises(ValueError, match="Caught") as loader:
        in_worker.reraise()
    assert describe(loader.value) == "ValueError: boom"
    message = f"\n\n-- Process 0 terminated with the following error:\n{trace}"
    assert describe(ProcessRaisedException(message, 0, 1)) == "ValueError: boom"
    groups = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
    assert groups is None or describe(groups("of tasks", [boom, KeyError(1)])) == "ValueError: boom"


def test_torchrun_s_error_is_told_as_the_one_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    ErrorHandler().record_exception(ValueError("boom"))
    later = ProcessFailure(0, 6, -signal.SIGTERM, "")
    later.timestamp += 60
    failed = ProcessFailure(1, 7, 1, str(file))
    assert describe(ChildFailedError("train.py", {0: later, 1: failed})) == "ValueError: boom (rank 1, pid 7)"
    ended = ChildFailedError("train.py", {3: ProcessFailure(1, 7, 2, "")})
    assert describe(ended) == "ended with exit code 2 (rank 3, pid 7)"
    assert describe(ChildFailedError("train.py", {0: later})) == "was ended by SIGTERM (rank 0, pid 6)"


@pytest.mark.needs("tenacity")
def test_a_call_that_was_retried_in_vain_is_told_as_its_last_error() -> None:
    tenacity: Any = importlib.import_module("tenacity")

    def ask() -> None:
        raise ValueError("boom")

    with pytest.raises(tenacity.RetryError) as raised:
        tenacity.retry(stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_none())(ask)()
    assert describe(raised.value) == "ValueError: boom"


def test_a_keyboard_interrupt_is_no_failure_of_the_step(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), capture(0, config=config_in(tmp_path)):
        raise KeyboardInterrupt
    assert drained(tmp_path).steps() == {}


def test_a_step_that_somebody_interrupted_is_not_told_as_one_that_ended(
    tmp_path: Path, lengths: dict[int, float]
) -> None:
    config = config_in(tmp_path, recorder={"last": 1})
    lengths[FIRST + 2] = 3.0
    steps_of(config, {}, FIRST + 2)
    with pytest.raises(KeyboardInterrupt), capture(FIRST + 2, config=config):
        raise KeyboardInterrupt
    layout = drained(tmp_path)
    assert report_of(layout, FIRST + 2).health.user_error == "KeyboardInterrupt"
    assert lines_of(layout)[-1].error == "KeyboardInterrupt"


def test_a_step_without_progress_is_written_while_it_runs(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"hang_seconds": 0.3, "last": 1})
    layout = RunLayout(tmp_path)
    with capture(7, config=config), trajectory("t-1"), span("search", role="env"):
        until(lambda: any(layout.step(7).processes.glob("*.json")))
        drained(tmp_path)
        report = report_of(layout, 7)
    assert report.health.recorder is not None
    assert report.health.recorder.trigger == "hang"
    assert not report.health.complete
    assert "step still ran" in text_of(report)
    assert report.breakdown.window_ns >= 3e8
    running = {(row.role, row.stage) for row in report.health.open_spans}
    assert running == {("agent_loop", "trajectory"), ("env", "search")}


def test_somebody_asks_for_the_last_steps(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    steps_of(config, {}, 8)
    request = request_capture(last=3, save_path=tmp_path)
    layout = RunLayout(tmp_path)
    until(lambda: len(layout.steps()) == 3)
    drained(tmp_path)
    assert list(layout.steps()) == [5, 6, 7]
    listening = on_demand._listener
    assert listening is not None
    assert listening._answers[request].state == "captured"
    assert listening._answers[request].steps == [5, 6, 7]
    with capture(8, config=config):
        assert slot.session() is None  # such a request captures no step to come


def test_the_passes_of_an_engine_are_in_the_step_that_nobody_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_kept", None)  # afterwards, the process keeps passes no more
    config, noted = config_in(tmp_path), {}
    engine = TorchRolloutProfiler(replica=0)
    for step in range(3):
        with capture(step, engines=[engine], config=config):
            until(lambda: passes.current() is not None)
            log = passes.current()
            assert log is not None
            for number in range(4 + step):
                began_ns = time.monotonic_ns()
                log.note(began_ns, began_ns + 1, "decode", {f"{step} {number}": 1}, [1], running=1, waiting=0)
            noted[step] = [f"{step} {number}" for number in range(4 + step)]
    recorder = standing_recorder()
    assert recorder.write_last(3) == [0, 1, 2]
    layout = drained(tmp_path)
    found = {step: load_step(layout.step(step).root).passes for step in noted}
    assert {step: engines[0].noted.requests.id for step, engines in found.items()} == noted
    parts = {step: read_parts(layout.step(step))[0] for step in noted}
    outcomes = {
        step: next(item for part in own for item in part.expected if item.name == "replica 0")
        for step, own in parts.items()
    }
    assert [(outcomes[step].state, outcomes[step].reason) for step in (1, 2)] == [("ok", None)] * 2


def test_a_step_that_runs_is_not_written_as_one_that_ended(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    times = steps_of(config, {}, 2)
    recorder = standing_recorder()
    with capture(2, config=config):
        assert recorder.write_last(3) == [0, 1]
    assert recorder.write_last(3) == [2]
    layout = drained(tmp_path)
    assert list(layout.steps()) == [0, 1, 2]
    assert report_of(layout, 2).health.complete
    baseline_of_the_first = report_of(layout, 0).baseline
    assert baseline_of_the_first is not None
    began, ended = times[1]
    assert baseline_of_the_first.next_ns is not None
    assert holds(baseline_of_the_first.next_ns, ended - began)


def test_a_run_that_keeps_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps_of(config_in(tmp_path, record="off"), {}, 2)
    code = run(["trigger", str(tmp_path), "--last", "3", "--wait", "20"])
    answer = " ".join(capsys.readouterr().out.split())
    assert code != 0
    assert "refused" in answer
    assert "record: off" in answer


@pytest.mark.parametrize("last", [0, True, "3"])
def test_a_wrong_number_of_steps_is_refused(tmp_path: Path, last: object) -> None:
    with pytest.raises(ConfigError, match=r"request_capture\(last\)"):
        request_capture(last=last, save_path=tmp_path)  # type: ignore[arg-type]


def test_without_a_trigger_one_line_per_step_is_all_that_is_written(tmp_path: Path) -> None:
    times = steps_of(config_in(tmp_path, control={"requests": False}), {3: 0.05}, 6)
    layout = drained(tmp_path)
    lines = lines_of(layout)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.json", next(layout.root.glob("steps_*")).name}
    assert [line.step for line in lines] == list(times)
    for line in lines:
        began, ended = times[line.step]
        assert holds(line.dur_ns, ended - began)
        assert holds(line.dur_ns, line.stages["rollout/generate"])
    assert lines[3].stages["rollout/generate"] >= 0.05


def test_captured_steps_before_the_first_recorded_one_have_lines(tmp_path: Path) -> None:
    config = config_in(tmp_path, steps=[0, 1, 3])
    for step in range(4):
        with capture(step, config=config):
            step_tokens(train=step + 1)
    lines = lines_of(drained(tmp_path))
    captured = [(line.step, line.captured, line.tokens["train"]) for line in lines]
    assert captured == [(0, True, 1), (1, True, 2), (2, False, 3), (3, True, 4)]


def test_work_ahead_for_a_later_step_is_no_stage_of_a_step(tmp_path: Path) -> None:
    config = config_in(tmp_path, steps=[1])
    for step in range(3):
        with capture(step, config=config):
            for number in (step, step + 1):
                with trajectory(f"t{number}", step=number):
                    time.sleep(0.01 * (number - step + 1))
    lines = lines_of(drained(tmp_path))
    assert [line.captured for line in lines] == [False, True, False]
    for line in lines:
        assert 0.01 <= line.stages["agent_loop/trajectory"] <= line.dur_ns / 1e9 - 0.02


def test_work_below_a_carrier_of_this_process_is_a_stage_in_no_step(tmp_path: Path) -> None:
    """So that captured and uncaptured steps are of one kind."""
    config = config_in(tmp_path, steps=[1])

    def work(place: Any) -> None:
        with attach(place), span("score"):
            time.sleep(0.002)

    for step in range(3):
        with capture(step, config=config), span("rewards"):
            work(carrier())
            thread = threading.Thread(target=work, args=(carrier(),))
            thread.start()
            thread.join()
    assert [set(line.stages) for line in lines_of(drained(tmp_path))] == [{"trainer/rewards"}] * 3


def test_a_forked_daemon_lists_a_captured_step_first_too(tmp_path: Path) -> None:
    config = config_in(tmp_path, steps=[1, 3])
    steps_of(config, {}, 1)
    child = os.fork()
    if child == 0:
        for step in (1, 2, 3):
            with capture(step, config=config):
                pass
        recorder = standing.standing()
        os._exit(0 if recorder is not None and recorder.drain(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = lines_of(drained(tmp_path))
    assert sorted((line.step, line.captured) for line in lines) == [
        (0, False),
        (1, True),
        (2, False),
        (3, True),
    ]


def test_the_file_of_lines_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_BYTES", 2000)
    path = tmp_path / "steps.jsonl"
    for step in range(200):
        steps.append(path, StepLine(step=step, start_ns=1, dur_ns=2))
        assert path.stat().st_size <= 2000
    numbers = [line.step for line in read_step_lines(path)]
    assert numbers == list(range(numbers[0], 200))


def test_a_capture_in_between_loses_nothing(tmp_path: Path) -> None:
    config = config_in(tmp_path, steps=[1], recorder={"triggers": []})
    steps_of(config, {}, 3)
    request_capture(last=3, save_path=tmp_path)
    layout = RunLayout(tmp_path)
    until(lambda: len(layout.steps()) == 3)
    drained(tmp_path)
    for step in range(3):
        report = report_of(layout, step)
        assert [(line.role, line.stage) for line in report.breakdown.lines[:1]] == [("rollout", "generate")]
        assert (report.health.recorder is None) == (step == 1)


def spans_of(layout: RunLayout, step: int) -> dict[str, tuple[bool, bool, str | None]]:
    """Return {stage: (it began before the step, it ended, stage of the span above it)}."""
    timeline = load_step(layout.step(step).root)
    return {
        span.stage: (
            span.start_ns < timeline.window.start_ns,
            span.dur_ns is not None,
            None if span.parent is None else timeline.spans[span.parent].stage,
        )
        for span in timeline.spans
    }


def numbers_of(layout: RunLayout, step: int) -> dict[str, int]:
    """Return {stage: number of its span} from the files of a step."""
    texts = [path.read_text() for path in layout.step(step).spans.glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["stage"]: line["span"] for line in lines if "stage" in line}


@pytest.mark.parametrize("captured", [[2], [1, 2], []], ids=["in one step", "in two in a row", "in none"])
def test_a_step_has_the_calls_that_ran_when_it_began(tmp_path: Path, captured: list[int]) -> None:
    """A rollout of asynchronous training begins in one step, and ends in a later one."""
    config = config_in(tmp_path, steps=captured, recorder={"triggers": []})
    at = [threading.Event() for _ in range(4)]

    def serve() -> None:
        with span("serve", role="rollout"):  # all the time: it says nothing about a step
            at[3].wait()

    def roll_out() -> None:
        with trajectory("t0"):
            with span("generate", role="rollout"):
                at[0].wait()
            with span("tool", role="env"), span("attempt", role="env"):
                at[1].wait()
            at[2].wait()

    threads = [threading.Thread(target=target) for target in (serve, roll_out)]
    with span("fit"):
        for step in range(4):
            with capture(step, config=config):
                if step == 1:
                    for thread in threads:
                        thread.start()
                    at[0].set()
                    until(lambda: standing_still_in("attempt"))
                if step == 2:
                    at[1].set()
                    until(lambda: not standing_still_in("tool"))
    recorder = standing_recorder()
    assert {"serve", "trajectory"} <= {call.stage for call in recorder.state().spans}
    if not captured:
        assert recorder.write_last(2) == [2, 3]
    layout = drained(tmp_path)
    for event in at:
        event.set()
    for thread in threads:
        thread.join()
    assert spans_of(layout, 2) == {
        "trajectory": (True, False, None),
        "tool": (True, True, "trajectory"),
        "attempt": (True, True, "tool"),
    }
    if 1 in captured:
        assert spans_of(layout, 1)["attempt"] == (False, False, "tool")
        assert set(spans_of(layout, 1)) == {"serve", "trajectory", "generate", "tool", "attempt"}
        assert numbers_of(layout, 2).items() <= numbers_of(layout, 1).items()
    assert report_of(layout, 2).health.complete


def standing_still_in(stage: str) -> bool:
    """Return whether a call of a stage runs."""
    recorded = [kept for kept in (slot.session(), slot.recorder) if kept is not None]
    return any(span.stage == stage for kept in recorded for span in kept.log.open_spans())


def test_attrs_functions_are_for_captures_alone(tmp_path: Path) -> None:
    seen: list[int] = []

    def attrs(size: int) -> dict[str, int]:
        seen.append(size)
        return {"size": size}

    @profile_step("actor", attrs=attrs)
    def update(size: int) -> None: ...

    config = config_in(tmp_path, steps=[1])
    for step in range(3):
        with capture(step, config=config):
            update(step)
    assert seen == [1]


def test_a_carrier_names_the_step_that_is_in_memory(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with capture(4, config=config), span("generate", role="rollout"):
        carried = carrier()
        assert carried is not None
        assert (carried["captured"], carried["step"]) == (4, 4)
        with attach(carried), span("tool", role="env"):
            pass
    written_on_request(tmp_path)
    timeline = load_step(RunLayout(tmp_path).step(4).root)
    parents = {span.stage: span.parent for span in timeline.spans}
    assert parents["generate"] is None
    assert parents["tool"] == next(i for i, span in enumerate(timeline.spans) if span.stage == "generate")


def test_memory_is_bounded_and_what_went_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"memory_mb": 1, "triggers": []})
    room = (1 << 20) // SPAN_BYTES
    with capture(0, config=config):
        for _ in range(room + 10):
            with span("token", role="rollout"):
                pass
    layout = written_on_request(tmp_path)
    (problem,) = manifest_of(layout.step(0)).problems()
    assert "spans: partial: " in problem
    assert problem.endswith("memory_mb is 1")
    assert len(load_step(layout.step(0).root).spans) == room


def test_what_goes_while_a_step_is_written_is_not_missing_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, recorder={"memory_mb": 1, "triggers": []})
    began, goes_on = threading.Event(), threading.Event()
    encoded = lines.encoded_spans

    def encode(batch: Sequence[lines.Record]) -> tuple[bytes, int]:
        began.set()
        assert goes_on.wait(20)
        return encoded(batch)

    steps_of(config, {}, 1)
    monkeypatch.setattr(lines, "encoded_spans", encode)
    recorder = standing_recorder()
    assert recorder.write_last(1) == [0]
    assert began.wait(20)
    with capture(1, config=config):
        for _ in range((1 << 20) // SPAN_BYTES):
            with span("token", role="rollout"):
                pass
    goes_on.set()
    assert manifest_of(drained(tmp_path).step(0)).problems() == []


def test_steps_that_are_to_be_written_stay_while_the_loop_goes_on(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"keep_steps": 2, "triggers": []})
    steps_of(config, {}, 1)
    recorder, goes_on = standing.standing(), threading.Event()
    assert recorder is not None
    recorder.later(lambda: None if goes_on.wait(20) else pytest.fail("the loop did not end"))
    steps_of(config, {}, 3)
    assert recorder.write_last(2) == [1, 2]
    steps_of(config, {}, 9)
    goes_on.set()
    layout = drained(tmp_path)
    for step in (1, 2):
        assert manifest_of(layout.step(step)).problems() == []
        assert [span.stage for span in load_step(layout.step(step).root).spans] == ["generate"]


def test_counters_that_had_gone_are_named(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"triggers": []})
    with capture(0, config=config):
        recorder = standing_recorder()
        sampler = recorder.sampler
        assert sampler is not None
        sampler.since_ns = time.monotonic_ns()
    recorder.write_last(1)
    (problem,) = manifest_of(drained(tmp_path).step(0)).problems()
    assert "counters: partial: " in problem


def test_a_span_in_memory_is_as_large_as_the_ring_assumes() -> None:
    process = ProcessInfo(role="actor", rank=0, world_size=1, host="h", pid=1)
    ring = Ring(process=process, run_id="r", memory_mb=64)
    number = 20_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(number):
        with ring.new("generate", "rollout"):
            pass
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert SPAN_BYTES / 2 < (after - before) / number < SPAN_BYTES


def test_steps_beyond_keep_steps_go(tmp_path: Path) -> None:
    config = config_in(tmp_path, recorder={"keep_steps": 3, "triggers": []})
    steps_of(config, {}, 10)
    drained(tmp_path)
    recorder = standing_recorder()
    assert len(recorder.log) == 3
    assert [step.number for step in recorder.steps.last(10)] == [7, 8, 9]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps_of(config_in(tmp_path, recorder={"triggers": []}), {}, 2)
    monkeypatch.setattr(write, "write_atomic", refuse)
    layout = written_on_request(tmp_path)
    spans, counters = manifest_of(layout.step(1)).problems()
    assert "failed: OSError: [Errno 28]" in spans
    assert "failed: OSError: [Errno 28]" in counters


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path), {}, 1)
    assert slot.active is not None
    assert in_child(lambda: slot.active is standing.standing() is None)


def test_without_a_folder_it_keeps_steps_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProfileConfig(control={"poll_seconds": 0.02})
    with pytest.raises(ValueError, match="no batch"), capture(3, config=config), span("update", role="actor"):
        raise ValueError("no batch")
    with capture(4, config=config):
        pass
    recorder = standing_recorder()
    assert [recorded.stage for recorded in recorder.log.copy().spans] == ["update"]
    drained(tmp_path)
    assert on_demand._listener is not None
    on_demand._listener._write()
    assert "ValueError: no batch" in caplog.text
    assert list(tmp_path.iterdir()) == []
    request_capture(last=2)  # the program names the steps itself
    layout = RunLayout(tmp_path / "outputs" / "profile")
    until(lambda: list(layout.steps()) == [3, 4])


def test_switched_off_it_does_not_start(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path, record="off"), {}, 1)
    assert standing.standing() is None
    assert slot.active is None


def test_yaml_reads_off_as_the_word(tmp_path: Path) -> None:
    file = tmp_path / "stepscope.yaml"
    file.write_text("record: off\n")
    assert ProfileConfig.from_file(file).record == "off"


PROGRAM = """
import sys, time
from stepscope import capture, configure, span
configure(save_path=sys.argv[1], record="spans", control={"poll_seconds": 0.05}, recorder={"then_capture": 0})
for step in range(int(sys.argv[2])):
    with capture(step), span("update", role="actor"):
        if step == int(sys.argv[2]) - 1:
            print("last", flush=True)
        time.sleep(60 if step == int(sys.argv[2]) - 1 else 0.01)
"""


def test_sigterm_writes_the_step_that_runs(tmp_path: Path) -> None:
    with ranks(1, PROGRAM, tmp_path, 4) as (program,):
        assert program.stdout is not None
        assert program.stdout.readline() == "last\n"
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == -signal.SIGTERM
    layout = RunLayout(tmp_path)
    assert list(layout.steps()) == [2, 3]
    manifest = manifest_of(layout.step(3))
    assert manifest.recorder is not None
    assert manifest.recorder.trigger == "signal"
    assert manifest.processes[0].ended_by == "signal"


def test_processes_of_one_run_write_the_same_steps(tmp_path: Path) -> None:
    """Each rank of torchrun bounds steps of its own: what one orders, all write."""
    with ranks(2, PROGRAM, tmp_path, 6) as programs:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        request_capture(last=3, save_path=tmp_path)
        steps = [RunLayout(tmp_path).step(step) for step in (2, 3, 4)]
        until(lambda: all(len(list(step.processes.glob("[!.]*.json"))) == 2 for step in steps))


@pytest.mark.slow
def test_one_of_the_ranks_that_write_a_step_logs_it(tmp_path: Path) -> None:
    with ranks(2, PROGRAM.replace("(60 if", "(no_such_name if"), tmp_path, 4) as programs:
        logged = "".join(program.communicate(timeout=60)[1] for program in programs)
    assert logged.count("NameError: name 'no_such_name' is not defined\n") == 2
    assert [logged.count(f"step {step} is on record") for step in (2, 3)] == [1, 1]


def test_what_was_triggered_is_written_before_the_process_ends(
    tmp_path: Path, lengths: dict[int, float]
) -> None:
    config = config_in(tmp_path, recorder={"then_capture": 0, "slow_factor": 12})
    lengths[15] = 0.3
    steps_of(config, {}, 16)
    shutdown.close_everything(Ending("exit", "the process exited"), 20)
    assert list(RunLayout(tmp_path).steps()) == [14, 15]


def test_counters_between_captures_are_written_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope._recording.recorder.recorder.COUNTERS_HZ", 20.0)
    config = config_in(tmp_path, recorder={"triggers": []})
    steps_of(config, {}, 1)
    with capture(1, config=config):
        began, burnt = time.monotonic(), time.process_time()
        while time.process_time() < burnt + 0.5:  # on a busy machine longer, and with more samples
            pass
        share = 100 * (time.process_time() - burnt) / (time.monotonic() - began)
    layout = written_on_request(tmp_path)
    report = report_of(layout, 1)
    assert report.counters is not None
    (cpu,) = [row for row in report.counters.rows if row.name == "process CPU"]
    assert cpu.mean is not None
    for mean in (cpu.mean, lines_of(layout)[1].counters["process CPU"]):
        assert share / 2 < mean < 2 * share  # on a busy machine, samples are not equally far apart


def test_a_step_that_is_written_at_once_has_samples_up_to_its_end(tmp_path: Path) -> None:
    """The next sample would come within a second. Until then nobody knows whether a thread lacked a core."""
    config = config_in(tmp_path, recorder={"triggers": []})
    steps_of(config, {}, 2)
    recorder = standing_recorder()
    assert recorder.write_last(1) == [1]
    timeline = load_step(drained(tmp_path).step(1).root)
    (cpu,) = [counter for counter in timeline.counters if counter.name == "process CPU"]
    assert cpu.times_ns[-1] >= timeline.window.end_ns


def test_counters_are_off_where_the_configuration_says_so(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path, counters={"hz": 0}), {}, 1)
    recorder = standing_recorder()
    assert recorder.sampler is None


def test_triggers_at_once_write_each_step_once(tmp_path: Path) -> None:
    steps_of(config_in(tmp_path), {}, 8)
    recorder = standing_recorder()
    at_once(8, lambda number: recorder.write_last(number + 1))
    layout = drained(tmp_path)
    assert list(layout.steps()) == list(range(8))
    assert all(len(manifest_of(layout.step(step)).processes) == 1 for step in range(8))


KILLED = """
import os, signal, sys
from stepscope import capture, configure, span
from stepscope._recording.recorder import standing, write
configure(save_path=sys.argv[1], record="spans", recorder={"triggers": []}, counters="off")
with capture(0):
    for _ in range(5000):
        with span("token", role="rollout"):
            pass
write.time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGKILL)  # after the first piece
standing.standing().write_last(1)
standing.standing().drain(60)
"""


def test_a_process_killed_while_it_writes_leaves_the_truth(tmp_path: Path) -> None:
    python(KILLED, tmp_path, status=-signal.SIGKILL)
    layout = RunLayout(tmp_path)
    (problem,) = manifest_of(layout.step(0)).problems()
    assert "spans: missing: " in problem
    assert not list(layout.step(0).spans.glob("[!.]*"))  # no half of a file
