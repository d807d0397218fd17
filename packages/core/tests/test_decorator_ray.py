"""profile_step in Ray: tasks and actors of a script and of a module, in workers that are being captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

HERE = Path(__file__).parent

SPANS = {
    "main_task": 1,
    "main_task_stream": 3,
    "task": 1,
    "task_stream": 3,
    "main_update": 1,
    "main_stream": 3,
    "above_ray_method": 1,
    "below_ray_method": 1,
    "update": 1,
    "double": 1,
    "main_generate": 3,
    "main_astream": 3,
    "generate": 1,
    "stream": 3,
    "locked_update": 1,
    "locked_generate": 1,
}
"""Spans that the calls of `ray_main.py` should leave; a generator of two items is resumed three times."""


class Ran(TypedDict):
    returned: dict[str, object]
    spans: dict[str, int]


@pytest.fixture(scope="module")
def ran(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    import ray

    spans = tmp_path_factory.mktemp("spans")
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(HERE / "ray_main.py"), str(spans), str(sum(SPANS.values())), address]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # the workers import the modules beside it
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result: Ran = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("main task", 2),
        ("task", [2, True]),
        ("main task stream", [0, 1]),
        ("task stream", [0, 1]),
        ("main actor", 2),
        ("main actor stream", [0, 1]),
        ("above ray.method", [1, 2]),
        ("below ray.method", [1, 2]),
        ("threaded actor", [2, 8]),
        ("main async actor", [1, 2, 3]),
        ("main async actor stream", [0, 1]),
        ("async actor", 2),
        ("async actor stream", [0, 1]),
        ("actor beside a lock", 2),
        ("async actor beside a lock", 2),
        ("wrong call", "too many positional arguments"),
    ],
)
def test_decorated_functions_work_in_ray(ran: Ran, call: str, expected: object) -> None:
    assert ran["returned"][call] == expected


@pytest.mark.parametrize("stage", SPANS)
def test_and_are_recorded_in_the_worker(ran: Ran, stage: str) -> None:
    assert ran["spans"].get(stage) == SPANS[stage]
