"""The demo's run from end to end, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
import ray

from packages.report.tests.steps import some
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.passes import SUFFIX
from stepscope_report.demo.trainer import ACTORS, GROUP, REPLICAS, Choice, DemoResult, choices, run_demo
from stepscope_report.sections.long_tail import step_long_tail
from stepscope_report.timeline import Span, Timeline, load_step
from stepscope_report.timeline.passes import RequestKey, linked_requests

LONG_RUN = """
import sys
from functools import partial
from pathlib import Path
from stepscope_report.demo import trainer

trainer.WARM_UP = 1
trainer.run_demo(Path(sys.argv[1]), steps=1000, captured=range(1000), on_progress=partial(print, flush=True))
"""

RAY_GIVES_UP_SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
"""The time that Ray's agents look for an ended control store: a minute by default."""


@pytest.fixture(scope="module")
def ran(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, list[str]]:
    lines: list[str] = []
    result = run_demo(
        tmp_path_factory.mktemp("demo"), steps=2, captured=(1, 7), seed=1, on_progress=lines.append
    )
    return result, lines


@pytest.fixture(scope="module")
def timeline(ran: tuple[DemoResult, list[str]]) -> Timeline:
    return load_step(RunLayout(ran[0].save_path).step(1).root)


def test_it_trains_and_captures_the_steps_that_there_are(ran: tuple[DemoResult, list[str]]) -> None:
    result, lines = ran
    assert list(RunLayout(result.save_path).steps()) == [1] == list(result.captured)
    assert len(result.rewards) == 2
    assert all(0 < reward < 1 for reward in result.rewards)
    assert [line for line in lines if line.endswith("captured")] == lines[-1:]


def test_a_ray_that_was_running_goes_on(ran: tuple[DemoResult, list[str]]) -> None:
    assert ray.is_initialized()


def test_it_ends_its_actors(ran: tuple[DemoResult, list[str]]) -> None:
    from ray._private.state import state

    deadline = time.monotonic() + 30
    while (alive := state.actor_table(None, None, "ALIVE")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_everything_that_was_promised_is_there(timeline: Timeline) -> None:
    assert timeline.manifest is not None
    assert timeline.manifest.problems() == []
    roles = Counter(process.info.role for process in timeline.processes)
    assert roles == {"trainer": 1, "actor": ACTORS, "ref": 1, "rollout": REPLICAS}


def test_every_actor_and_replica_has_a_trace(ran: tuple[DemoResult, list[str]]) -> None:
    traces = RunLayout(ran[0].save_path).step(1).traces
    files = (path for path in traces.rglob("*.json.gz") if not path.name.endswith(SUFFIX))
    counts = Counter(path.relative_to(traces).parts[0] for path in files)
    assert counts == {"actor": ACTORS, "ref": 1, "rollout": REPLICAS}


def test_what_a_replica_does_hangs_below_the_turn_that_asked_for_it(timeline: Timeline) -> None:
    def above(span: Span) -> list[str]:
        parents = []
        while span.parent is not None:
            span = timeline.spans[span.parent]
            parents.append(span.stage)
        return parents

    decoded = [span for span in timeline.spans if span.stage == "decode"]
    assert decoded
    for span in decoded:
        assert above(span) == ["generate", "turn", "trajectory", "generate"]
        assert span.trajectory is not None
        assert span.policy_version == 1
        assert not timeline.processes[span.process].owner


def test_the_passes_wrote_the_tokens_that_the_agent_loop_got_each_for_a_turn(timeline: Timeline) -> None:
    got = {
        (span.trajectory, span.turn): (span.attrs or {})["tokens"]
        for span in timeline.spans
        if span.stage == "generate" and span.turn is not None
    }
    links = linked_requests(timeline)
    wrote = Counter[tuple[str | None, int | None]]()
    for at, engine in enumerate(timeline.passes):
        for request, tokens in zip(engine.noted.served.request, engine.noted.served.output, strict=True):
            span = timeline.spans[links[RequestKey(at, request)]]
            wrote[span.trajectory, span.turn] += tokens
    assert len(timeline.passes) == REPLICAS
    assert len(links) == sum(len(engine.noted.requests.id) for engine in timeline.passes)
    assert wrote == got


def test_a_turn_is_as_long_as_what_its_engine_did_and_the_rest(timeline: Timeline) -> None:
    tail = some(step_long_tail(timeline))
    for slow in tail.worst:
        assert [own.turn for own in slow.turns] == list(range(len(slow.turns)))
        for own in slow.turns:
            assert own.engine.total_ns + own.outside_ns == own.wall_ns
            assert own.engine.prefill_ns > 0


def test_every_trajectory_is_recorded_with_its_reward(timeline: Timeline) -> None:
    names = {span.trajectory for span in timeline.spans if span.stage == "trajectory"}
    rewards = [span.attrs for span in timeline.spans if span.stage == "compute_reward"]
    assert len(names) == len(rewards) == GROUP * 16
    assert all(attrs is not None and "reward" in attrs for attrs in rewards)


def test_lengths_have_a_long_tail(timeline: Timeline) -> None:
    turns = Counter(span.trajectory for span in timeline.spans if span.stage == "turn")
    assert max(turns.values()) > 2 * sorted(turns.values())[len(turns) // 2]


def test_engines_are_named_with_the_pythons_that_they_run_on() -> None:
    assert choices("vllm") == [Choice("vllm", None)]
    both = choices("vllm=/a/bin/python,sglang=/b/bin/python")
    assert both == [Choice("vllm", "/a/bin/python"), Choice("sglang", "/b/bin/python")]


def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines: list[str] = []
    with pytest.raises(ConfigError, match="save_path"):
        run_demo(tmp_path / "file" / "profile", on_progress=lines.append)
    assert lines == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by their environment")
def test_ctrl_c_in_a_captured_step_leaves_no_process_behind(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    demo = subprocess.Popen(
        [sys.executable, "-c", LONG_RUN, str(tmp_path)],
        env={**os.environ, "DEMO_MARK": mark, **RAY_GIVES_UP_SOON},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("step 0"):
            break
    demo.send_signal(signal.SIGINT)
    _, stderr = demo.communicate(timeout=120)
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    # Ray kills a raylet that takes more than a second to end. Its workers notice that soon after.
    deadline = time.monotonic() + 120
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    last = load_step(list(RunLayout(tmp_path).steps().values())[-1].root)
    assert last.window.closed


def processes_with(mark: str) -> list[str]:
    """Return the command lines of the processes that inherited `mark` in their environment."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended, or is another user's
    return commands
