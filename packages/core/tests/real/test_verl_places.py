"""stepscope among verl's loggers and profiler tools, in the real package."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils import omega_conf_to_dataclass, profiler, tracking
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.profiler.torch_profile import build_trace_basename

import stepscope
from stepscope._recording.process import identity
from stepscope._recording.spans import slot
from stepscope.files.layout import RunLayout
from stepscope.files.scalars import read_metrics
from stepscope.files.spans import Line, Span
from stepscope.integrations import verl, verl_tool
from stepscope_report.timeline import load_step
from stepscope_report.timeline.plain import read_plain

pytestmark = pytest.mark.filterwarnings("ignore")  # verl and its packages use what others deprecate
NUMBERS = {"timing_s/gen": 4.03, "critic/score/mean": 0.5, "response_length/mean": 32, "training/epoch": 0}
LOADED = "from verl.utils.tracking import Tracking; print('stepscope' in Tracking.supported_backend)"
PROFILER = "actor_rollout_ref.actor.profiler"


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert slot.session() is None
    assert verl_tool._capture is None


def settings(folder: Path, *overrides: str) -> Any:
    """Return verl's configuration of a PPO trainer whose profiler tool is stepscope."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            ["global_profiler.tool=stepscope", f"global_profiler.save_path={folder}", *overrides],
        )
    OmegaConf.resolve(config)  # as verl's TaskRunner
    return config


class Worker(DistProfilerExtension):  # type: ignore[misc]  # verl has no types
    """A worker that makes its profiler as verl's `ActorRolloutRefWorker` does."""

    def __init__(self, config: Any, rank: int = 0) -> None:
        role = config.actor_rollout_ref.actor.profiler
        block = omega_conf_to_dataclass(role, dataclass_type=profiler.ProfilerConfig)
        super().__init__(DistProfiler(rank, config=block, tool_config=None, save_file_prefix="actor"))

    @DistProfiler.annotate(color="red", role="actor_update")  # type: ignore[untyped-decorator]  # likewise
    def update_actor(self, batch: int) -> int:
        return 2 * batch


def stages(folder: Path) -> dict[int, list[str]]:
    stepscope.flush(10)
    decode = msgspec.json.Decoder(Line).decode_lines
    return {
        step: [
            f"{line.role}/{line.stage}"
            for file in layout.spans.glob("*.jsonl")
            for line in decode(file.read_bytes())
            if isinstance(line, Span)
        ]
        for step, layout in RunLayout(folder).steps().items()
    }


def test_the_logger_keeps_what_verls_own_file_has_of_a_captured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    stepscope.configure(save_path=tmp_path, steps=[2])
    logger = tracking.Tracking("project", "experiment", ["file", "stepscope"])
    for step in (1, 2):
        with stepscope.capture(step, role="trainer"):
            pass
        logger.log({**NUMBERS, "step": step}, step)
    stepscope.flush(10)
    written = [json.loads(line) for line in (tmp_path / "verl.jsonl").read_text().splitlines()]
    assert read_metrics(RunLayout(tmp_path).step(2), identity.run_id()) == written[1]["data"]
    assert sorted(RunLayout(tmp_path).steps()) == [2]


@pytest.mark.parametrize("backends", ["stepscope", ["stepscope"], ["console", "stepscope"]])
def test_the_logger_is_made_where_it_is_named(backends: str | list[str]) -> None:
    assert "stepscope" in tracking.Tracking("project", "experiment", backends).logger
    assert "stepscope" not in tracking.Tracking("project", "experiment", default_backend="console").logger
    with pytest.raises(AssertionError, match="stepscop is not"):
        tracking.Tracking("project", "experiment", "stepscop")


@pytest.mark.parametrize("way", ["entry point", "plug-in", "preset"])
def test_verl_is_unedited(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", LOADED]
    if way != "entry point":
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    if way == "plug-in":
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", verl.__name__)
    if way == "preset":
        options = ["--preset", "verl", "--steps", "2", "--save-path", str(tmp_path)]
        command = [sys.executable, "-m", "stepscope", "run", *options, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True", done.stderr


def test_a_process_that_imports_verl_has_what_the_trainer_of_its_job_published(tmp_path: Path) -> None:
    program = str(Path(__file__).parents[1] / "verl_cpu" / "join_job.py")
    command = [sys.executable, program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    expected = str(stepscope.ProfileConfig(steps=[2, 5]).steps)
    assert done.stdout.splitlines()[-3:] == ["None", expected, "None"]


@pytest.mark.parametrize("by_preset", [False, True])
def test_verls_annotations_for_rl_insight_are_spans_and_no_work_has_two(
    by_preset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rl_insight")
    monkeypatch.setenv("VERL_RL_INSIGHT_ENABLE", "1")
    worker = Worker(settings(tmp_path))
    stepscope.configure(save_path=tmp_path, steps=[2])
    with stepscope.capture(2, role="trainer"):
        around = stepscope.span("update_actor", role="actor") if by_preset else contextlib.nullcontext()
        with around:
            assert worker.update_actor(1) == 2
        with tracking.RLInsightLogger.trace_state("train_batch", state_lane_id="rank_0", epoch=1):
            pass
        with tracking.RLInsightLogger.trace_state("vllm_generate", state_lane_id="replica_3"):
            pass
    stepscope.flush(10)
    spans = load_step(RunLayout(tmp_path).step(2).root).spans
    assert [(span.role, span.stage, span.attrs) for span in spans] == [
        ("actor", "update_actor", None),
        ("trainer", "train_batch", {"epoch": 1}),
        ("rollout", "generate", {"replica": 3}),
    ]


def test_verls_annotations_record_nothing_where_they_are_off(tmp_path: Path) -> None:
    worker = Worker(settings(tmp_path))
    stepscope.configure(save_path=tmp_path, steps=[2])
    with stepscope.capture(2, role="trainer"):
        assert worker.update_actor(1) == 2
    assert stages(tmp_path) == {2: []}


def test_weights_are_sent_to_every_kind_of_caller_as_without_the_preset(tmp_path: Path) -> None:
    # verl's `auto_await` looks whether its caller is a coroutine.
    program = str(Path(__file__).parents[1] / "verl_cpu" / "sync_weights.py")
    settings = ["--preset", "verl", "--steps", "1,2", "--save-path", str(tmp_path)]
    under_us = [sys.executable, "-m", "stepscope", "run", *settings, "--"]
    plain, recorded = (
        subprocess.run([*command, program], capture_output=True, text=True, check=True, timeout=200).stdout
        for command in ([sys.executable], under_us)
    )
    assert recorded.splitlines()[-4:] == plain.splitlines()[-4:]
    assert "resume_generation" in plain
    manager = ["trainer/abort_requests", "trainer/resume_requests", "trainer/sync_weights"]
    assert {step: sorted(names) for step, names in stages(tmp_path).items()} == {1: manager, 2: manager}


def test_verls_calls_open_and_close_captures_in_its_workers(tmp_path: Path) -> None:
    worker = Worker(settings(tmp_path, f"{PROFILER}.enable=True", f"{PROFILER}.all_ranks=True"))
    assert worker.update_actor(1) == 2
    for step in (3, 5):
        worker.start_profile(role="train", profile_step=step)
        assert worker.update_actor(1) == 2
        worker.stop_profile(run_command=False)
    assert worker.update_actor(1) == 2
    assert stages(tmp_path) == {3: ["actor/actor_update"], 5: ["actor/actor_update"]}


@pytest.mark.parametrize(
    ("blocks", "recorded"),
    [
        ({}, []),
        ({"enable": "True"}, [0]),
        ({"enable": "True", "ranks": "[1]"}, [1]),
        ({"enable": "True", "all_ranks": "True"}, [0, 1]),
        ({"enable": "False", "all_ranks": "True"}, []),
    ],
)
def test_verls_ranks_decide_who_is_captured(
    blocks: dict[str, str], recorded: list[int], tmp_path: Path
) -> None:
    config = settings(tmp_path, *(f"{PROFILER}.{name}={value}" for name, value in blocks.items()))
    for rank in (0, 1):
        worker = Worker(config, rank)
        worker.start_profile(profile_step=2)
        assert (slot.session() is not None) == (rank in recorded)
        worker.stop_profile()
    assert sorted(stages(tmp_path)) == ([2] if recorded else [])


def test_within_the_drivers_capture_a_worker_opens_none_and_records_nothing_twice(tmp_path: Path) -> None:
    worker = Worker(settings(tmp_path / "verl", f"{PROFILER}.enable=True"))
    stepscope.configure(save_path=tmp_path / "driver", steps=[2])
    with stepscope.capture(2, role="trainer"):
        worker.start_profile(profile_step=2)
        worker.update_actor(1)
        worker.stop_profile()
        assert slot.active is not None
    assert stages(tmp_path / "verl") == {}
    assert stages(tmp_path / "driver") == {2: []}


def test_verls_finish_command_runs_once_and_by_verl(tmp_path: Path) -> None:
    command = f'echo "$VERL_PROFILE_ROLE" >> {tmp_path / "done"}'
    config = settings(tmp_path, f"{PROFILER}.enable=True", f"{PROFILER}.finish_hook_cmd='{command}'")
    worker = Worker(config)
    for step, last in ((2, False), (3, True)):
        worker.start_profile(profile_step=step)
        worker.stop_profile(run_command=last)
    assert sorted(stages(tmp_path)) == [2, 3]
    assert (tmp_path / "done").read_text().split() == ["actor"]


def test_the_trainer_takes_steps_ranks_and_roles_from_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPSCOPE_STEPS", raising=False)
    config = settings(
        tmp_path,
        "global_profiler.steps=[2,5]",
        f"{PROFILER}.enable=True",
        f"{PROFILER}.ranks=[0,8]",
        f"{PROFILER}.tool_config.torch.contents=[cpu,stack]",
    )
    read = verl_tool.read_config(config)
    assert [step for step in range(10) if read.selects(step)] == [2, 5]
    assert read.save_path == str(tmp_path)
    # the rollout's block is the actor's, unless it has its own values
    assert {name: role.ranks for name, role in read.roles.items()} == {"actor": (0, 8), "rollout": (0, 8)}
    assert (read.tool, read.torch.with_stack, read.finish.command) == ("torch", True, None)
    assert [entry.preset for entry in read.instrument] == ["verl"]


def test_a_trainer_without_an_enabled_profiler_records_spans_alone(tmp_path: Path) -> None:
    read = verl_tool.read_config(settings(tmp_path, "global_profiler.steps=[2,5]"))
    assert [step for step in range(10) if read.selects(step)] == [2, 5]
    ((name, role),) = read.roles.items()
    assert (name, role.profiler, role.engine.profiler) == ("*", False, False)


def test_the_environment_lies_over_verls_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_SAVE_PATH", str(tmp_path / "run"))
    read = verl_tool.read_config(settings(tmp_path, "global_profiler.steps=[2]", f"{PROFILER}.enable=True"))
    assert read.save_path == str(tmp_path / "run")
    assert read.selects(2)


@pytest.mark.parametrize("topology", [{}, {"rank": 1, "world_size": 2, "tp": 0, "pp": 0, "dp": 1}])
def test_the_name_that_verl_gives_a_trace_tells_its_process(tmp_path: Path, topology: dict[str, int]) -> None:
    name = build_trace_basename(1, "train", "actor_rollout", topology=topology, profile_step=3)
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 0.0, "dur": 5.0}
    document = {"schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000 * 10**9, "traceEvents": [event]}
    (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (process,) = read_plain([tmp_path]).timeline.processes
    assert (process.info.role, process.info.rank) == ("actor-rollout", 1)
    assert process.info.world_size == topology.get("world_size")
