"""Tests that take minutes: several workers, experts, a worker on a host of its own, and crashes of vLLM.

Run on request (`dev.py test --engines vllm_more-0.32.0`), as root, because a worker gets mounts of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import vllm  # noqa: F401  where it is not installed this file is left out

from stepscope import ProfileConfig, capture
from stepscope.files.sidecar import Sidecar
from stepscope_vllm import VllmServer

Outcomes: TypeAlias = dict[str, dict[str, Any]]
"""{subject: what `more_main.py` printed about it}."""
Run: TypeAlias = Callable[..., Outcomes]
MAIN = Path(__file__).with_name("more_main.py")
_LIMIT_S = 1500


@pytest.fixture(autouse=True)
def own_limits() -> None:
    """Replace the time limit of other tests. An engine has `_LIMIT_S`, and a server has its own limit."""


@pytest.fixture(scope="session")
def run(
    model: str, expert_model: str, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Return `run(case, tensor_parallel_size=2)`, which runs each case once."""

    @cache
    def running(case: str, **arguments: int) -> Outcomes:
        folder = tmp_path_factory.mktemp(case)
        given = json.dumps({**sizes, **arguments})
        used = expert_model if case.startswith("expert") else model
        words = [sys.executable, str(MAIN), case, used, str(folder / "run"), given]
        places = [str(MAIN.parent), os.environ.get("PYTHONPATH", "")]
        workers = prod(value for name, value in arguments.items() if name.endswith("_parallel_size"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("01" * (workers // 2)) or "nobind",
        }
        log = folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, start_new_session=True
            )
        try:
            printed, _ = process.communicate(timeout=_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
        assert process.returncode == 0, f"{lines}\n{log.read_text()[-3000:]}"
        return {line["case"]: line for line in lines}

    return running


def placed(outcome: dict[str, Any]) -> list[tuple[int, dict[str, int]]]:
    return [(file["artifact"]["rank"], file["artifact"]["topology"]) for file in outcome["files"]]


@pytest.fixture(params=["pipeline", "experts", "expert_parallel", "data_parallel"])
def two_workers(request: pytest.FixtureRequest, run: Run) -> Outcomes:
    """Return the outcomes of an engine with two workers. `pipeline` and `data_parallel` have stepscope's
    extension. `experts` and `expert_parallel`, mixtures of experts, do not.
    """
    case = str(request.param)
    if case == "pipeline":
        return run(case, pipeline_parallel_size=2)
    if case == "data_parallel":
        return run(case, data_parallel_size=2)
    return run(case, tensor_parallel_size=2, **({"enable_expert_parallel": True} if "_" in case else {}))


def test_each_worker_of_two_has_its_global_rank(two_workers: Outcomes) -> None:
    outcome = two_workers["ranks all"]
    assert (outcome["state"], [rank for rank, _ in placed(outcome)]) == ("ok", [0, 1])


def test_the_ranks_that_are_asked_for_are_there_and_the_others_of_the_engine_are_named(
    two_workers: Outcomes,
) -> None:
    outcome = two_workers["ranks [0, 5]"]
    assert [rank for rank, _ in placed(outcome)] == [5]
    assert [file["options"]["left_aside"] for file in outcome["files"]] == ["rank 4"]


def test_an_engine_whose_core_was_killed_between_captures_fails_the_next_at_once(
    two_workers: Outcomes,
) -> None:
    outcome = two_workers["its core was killed before the capture"]
    assert outcome["state"] == "failed"
    assert "engine is dead" in outcome["reason"]


def test_a_stage_of_a_pipeline_stands_in_the_topology(run: Run) -> None:
    places = placed(run("pipeline", pipeline_parallel_size=2)["ranks all"])
    assert places == [(0, {"tp": 0, "pp": 0, "dp": 0}), (1, {"tp": 0, "pp": 1, "dp": 0})]


def test_a_grid_of_stages_and_tensor_parallel_workers_has_each_at_its_place(run: Run) -> None:
    outcomes = run("grid", tensor_parallel_size=2, pipeline_parallel_size=2)
    places = [{"tp": tp, "pp": pp, "dp": 0} for pp in (0, 1) for tp in (0, 1)]
    assert placed(outcomes["ranks all"]) == list(enumerate(places))
    (last,) = outcomes["ranks [0, 11]"]["files"]
    assert last["artifact"]["rank"] == 11
    assert last["options"]["left_aside"] == "rank 8, rank 9, rank 10"


def test_captures_that_follow_each_other_at_once_have_all_workers_of_a_grid(run: Run) -> None:
    """The first pipeline stage waits for its sends in the next capture."""
    outcomes = run("grid", tensor_parallel_size=2, pipeline_parallel_size=2)
    steps = [outcomes[f"step {step}"] for step in range(3, 9)]
    assert [[rank for rank, _ in placed(outcome)] for outcome in steps] == [[0, 1, 2, 3]] * 6


def test_of_data_parallel_engines_each_stands_in_the_topology(run: Run) -> None:
    places = placed(run("data_parallel", data_parallel_size=2)["ranks all"])
    assert places == [(0, {"tp": 0, "pp": 0, "dp": 0}), (1, {"tp": 0, "pp": 0, "dp": 1})]


def test_files_of_experts_are_found_by_the_names_that_vllm_gives_them(run: Run) -> None:
    outcome = run("experts", tensor_parallel_size=2)["ranks all"]
    assert all("_dp0_pp0_tp" in file["name"] for file in outcome["files"])
    apart = run("expert_parallel", tensor_parallel_size=2, enable_expert_parallel=True)["ranks all"]
    assert [file["name"].partition("_ep")[2][0] for file in apart["files"]] == ["0", "1"]


def read(outcome: dict[str, Any], kind: str) -> str:
    """Return the content of the only trace of a kind. The trace is not compressed."""
    (path,) = (file["path"] for file in outcome["files"] if file["artifact"]["kind"] == kind)
    return Path(path).read_text()


def test_the_schedule_of_an_engine_and_its_plain_files_are_those_of_each_capture(run: Run) -> None:
    for step in (1, 2):
        text = read(run("options")[f"step {step}"], "vllm_trace")
        events = json.loads(text)["traceEvents"]
        names = {str(event.get("name")) for event in events}
        assert len([name for name in names if name.startswith("ProfilerStep#")]) == 3


def test_the_frontend_records_when_the_engine_was_built_to(run: Run) -> None:
    assert read(run("options")["step 1"], "vllm_frontend_trace")


@pytest.mark.parametrize("mark", ['"Input Dims"', '"python_function"', '"[memory]"'])
def test_an_option_is_of_the_capture_that_asks_for_it(run: Run, mark: str) -> None:
    recorded = [mark in read(run("options")[f"step {step}"], "vllm_trace") for step in (1, 2)]
    assert recorded == [False, True]


def test_a_stop_that_takes_too_long_ends_at_its_deadline_and_the_files_come_later(run: Run) -> None:
    frozen, later = run("trouble")["its worker is frozen in the stop"], run("trouble")["its worker goes on"]
    assert (frozen["state"], frozen["code"]) == ("pending", 3)
    assert "timeout" in frozen["reason"]
    assert frozen["took_s"] < 15
    assert (later["state"], len(later["files"]), later["code"]) == ("ok", 1, 0)


def test_files_of_a_stop_that_took_too_long_are_found_after_the_next_capture_gave_it_up(run: Run) -> None:
    outcome = run("trouble")["its worker is frozen until the next capture has begun"]
    assert (outcome["state"], len(outcome["files"])) == ("ok", 1)
    assert run("trouble")["the next capture"]["state"] == "ok"


def test_an_idle_engine_with_stacks_ends_at_the_budget(run: Run) -> None:
    outcome = run("trouble")["idle with stacks and a budget"]
    assert outcome["state"] == "ok"
    assert ["0.3 s" in file["artifact"]["truncated"] for file in outcome["files"]] == [True]


def test_an_engine_that_sleeps_is_captured(run: Run) -> None:
    outcome = run("trouble")["asleep"]
    assert (outcome["asleep"], outcome["state"], len(outcome["files"])) == (True, "ok", 1)


def test_the_trace_of_a_worker_on_another_host_comes_home(run: Run) -> None:
    outcome = run("trouble")["its worker has a disk of its own"]
    assert (outcome["state"], outcome["ignored"]) == ("ok", {})
    assert [file["artifact"]["host"] for file in outcome["files"]] == ["other-host"]


def test_an_engine_whose_core_is_killed_in_a_capture_fails_it_and_its_worker_ends(run: Run) -> None:
    outcome = run("trouble")["its core is killed in the capture"]
    assert outcome["state"] == "failed"
    assert "dead" in outcome["reason"]
    assert "worker ends with" in run("trouble")


def test_each_server_behind_a_router_is_a_replica_with_the_files_that_it_wrote_itself(
    serve: Callable[[ProfileConfig, int], AbstractContextManager[Any]],
    route: Callable[..., AbstractContextManager[str]],
    config: ProfileConfig,
    run_folder: Path,
) -> None:
    with serve(config, 0) as first, serve(config, 1) as second, route([first.url, second.url]) as url:
        replicas = VllmServer.behind(url, run_folder / ".vllm")
        for step, worker in ((1, first), (2, second)):
            with capture(step, engines=replicas, config=config) as cap:
                worker.complete(20)
            cap.result.raise_for_missing()
            sidecars = sorted((run_folder / f"step_{step:06d}").rglob("*.meta.json"))
            loaded = [msgspec.json.decode(path.read_bytes(), type=Sidecar) for path in sidecars]
            assert [sidecar.artifact.replica for sidecar in loaded] == [0, 1]
            sizes = {str(sidecar.options["url"]): sidecar.artifact.size_bytes or 0 for sidecar in loaded}
            # The server that generated has the larger trace, under its own URL.
            assert max(sizes, key=sizes.__getitem__) == worker.url
