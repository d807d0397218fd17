"""A weight sync whose two ends are decorated, in real Ray actors, against the driver's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.steps import MS
from stepscope import ProfileConfig, capture, profile_step, span
from stepscope.files.layout import RunLayout
from stepscope_report.sections.breakdown import Breakdown, step_breakdown
from stepscope_report.spans import MOVES_WEIGHTS, TRANSFER
from stepscope_report.timeline import load_step

ray = pytest.importorskip("ray")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("ray_cluster")


class Trainer:
    @profile_step(role="actor")
    def send_weights(self) -> Any:
        return np.ones(8 << 20)


class Engine:
    @profile_step(role="rollout")
    def receive_weights(self, weights: Any) -> float:
        return float(weights[0])


@pytest.fixture
def actors() -> Iterator[tuple[Any, Any]]:
    made = ray.remote(Trainer).remote(), ray.remote(Engine).remote()
    ray.get(made[1].receive_weights.remote(made[0].send_weights.remote()))
    yield made
    for actor in made:
        ray.kill(actor)


def synced(
    folder: Path, actors: tuple[Any, Any], around: Callable[[], AbstractContextManager[object]]
) -> tuple[Breakdown, int]:
    """Return the account of a step that does nothing else, and what the sync took by the driver's clock."""
    trainer, engine = actors
    config = ProfileConfig(save_path=str(folder), steps=[0], roles={"none": {"ranks": "all"}})
    with capture(0, config=config, workers={"actor": [trainer], "rollout": [engine]}) as cap:
        began_ns = time.perf_counter_ns()
        with around():
            ray.get(engine.receive_weights.remote(trainer.send_weights.remote()))
        took_ns = time.perf_counter_ns() - began_ns
    cap.result.wait()
    return step_breakdown(load_step(RunLayout(folder).step(0).root)), took_ns


def moved_ns(account: Breakdown) -> int:
    return sum(line.wall_ns for line in account.lines if line.stage and MOVES_WEIGHTS.search(line.stage))


def test_what_passes_between_the_two_ends_is_named(tmp_path: Path, actors: tuple[Any, Any]) -> None:
    account, took_ns = synced(tmp_path, actors, nullcontext)
    assert [line.role for line in account.lines if line.stage == TRANSFER] == ["rollout"]
    beside = {(gap.before and gap.before[1], gap.after and gap.after[1]) for gap in account.gaps}
    assert beside == {(None, "send_weights"), ("receive_weights", None)}
    dispatch_ns = sum(gap.wall_ns for gap in account.gaps)
    assert moved_ns(account) + dispatch_ns == pytest.approx(took_ns, abs=5 * MS)


def test_a_span_around_both_ends_names_all_of_it(tmp_path: Path, actors: tuple[Any, Any]) -> None:
    account, took_ns = synced(tmp_path, actors, lambda: span("weight_sync"))
    assert moved_ns(account) == pytest.approx(took_ns, abs=5 * MS)  # a busy machine
    assert not any(line.stage == TRANSFER for line in account.lines)
