"""Collectives are spans: real torch.distributed with gloo."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from packages.core.tests.runs import ranks, standing_recorder
from stepscope import capture, profile_step
from stepscope import span as profiled
from stepscope._recording.spans import collective_calls
from stepscope._recording.spans.span import Span
from stepscope.config import ProfileConfig
from stepscope.files.layout import RunLayout
from stepscope.files.values import AttrValue
from stepscope.testing.recorded_run import finished_spans
from stepscope_report import step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.stragglers import unseen_collectives
from stepscope_report.timeline import load_step

pytestmark = pytest.mark.usefixtures("one_recorder")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Provide a process group of this process alone."""
    store = FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def config(tmp_path: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(tmp_path / "run"), recorder={"triggers": ()}, counters="off")


def world() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None
    return group


def kept() -> list[Span]:
    recorder = standing_recorder()
    return recorder.log.copy().spans


@pytest.mark.usefixtures("group")
def test_a_call_is_one_span_below_the_call_that_made_it(config: ProfileConfig) -> None:
    @profile_step("actor")
    def update() -> None:
        distributed.all_reduce(torch.ones(2))
        distributed.barrier()

    with capture(1, config=config):
        update()
    above, first, second = kept()
    assert [one.stage for one in (above, first, second)] == ["update", "all_reduce", "barrier"]
    assert first.parent is above
    assert first.end_ns is not None
    assert second.end_ns is not None
    assert above.start_ns < first.start_ns < first.end_ns <= second.start_ns < second.end_ns
    assert first.attrs is not None
    assert second.attrs is not None
    assert (first.attrs["wait"], first.attrs["group"]) == (True, world().group_name)
    assert second.attrs["sequence"] == first.attrs["sequence"] + 1  # type: ignore[operator] # an int


@pytest.mark.usefixtures("group")
def test_of_an_asynchronous_call_the_wait_is_the_span(config: ProfileConfig) -> None:
    with capture(1, config=config):
        work = distributed.all_reduce(torch.ones(2), async_op=True)
        torch.ones(100, 100).mm(torch.ones(100, 100)).sum().item()
        for _ in range(20_000):  # longer than a wait at once
            pass
        assert kept() == []
        work.wait()
        work.wait()
    (waited,) = kept()
    assert waited.attrs is not None
    issued_ns = waited.attrs["issued_ns"]
    assert isinstance(issued_ns, int)
    assert issued_ns > 50_000


@pytest.mark.usefixtures("group")
def test_a_call_that_nobody_waits_for_is_no_wait(config: ProfileConfig) -> None:
    with capture(1, config=config):
        with profiled("update", role="actor"):
            work = distributed.all_reduce(torch.ones(2), async_op=True)
        del work
        gc.collect()
        with profiled("reward", role="reward"):
            collective_calls.sweep()
    with capture(2, config=config):
        above, _, span = kept()
    assert span.parent is above
    assert span.end_ns is not None
    assert span.attrs is not None
    assert "wait" not in span.attrs


@pytest.mark.usefixtures("group")
def test_calls_that_nobody_waits_for_are_in_their_capture_and_do_not_pile_up(config: ProfileConfig) -> None:
    with capture(1, config=config.replace(steps=[1], roles={"*": {"profiler": "off"}})) as cap:
        for _ in range(600):
            distributed.all_reduce(torch.ones(2), async_op=True)
        assert len(collective_calls._issued) <= collective_calls._SWEEP_AT
    cap.result.wait()
    assert [span.stage for span in finished_spans(config.save_path)] == ["all_reduce"] * 600


@pytest.mark.usefixtures("group")
def test_an_error_of_the_call_and_the_result_pass_through(config: ProfileConfig) -> None:
    tensor = torch.ones(2)
    with capture(1, config=config):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            world().allreduce(7)  # type: ignore[call-overload] # the user's mistake
        assert world().allreduce([tensor]).wait() is True
    assert len(kept()) == 1


@pytest.mark.usefixtures("group")
def test_they_are_on_record_in_captures_and_switched_off_by_a_word(config: ProfileConfig) -> None:
    for step, is_on in ((1, True), (2, False)):
        chosen = config.replace(steps=[step], collectives=is_on, roles={"*": {"profiler": "off"}})
        with capture(step, config=chosen) as cap:
            distributed.all_reduce(torch.ones(2))
        cap.result.wait()
    assert [(one.stage, one.step) for one in finished_spans(config.save_path)] == [("all_reduce", None)]


def test_the_state_names_the_call_that_is_in_a_collective(config: ProfileConfig) -> None:
    attrs: dict[str, AttrValue] = {"wait": True, "group": "0", "sequence": 1}
    with capture(1, config=config):
        recorder = standing_recorder()
        outside = collective_calls._begin("barrier", attrs, time.monotonic_ns(), None)
        with profiled("update", role="actor"):
            inside = collective_calls._begin("all_reduce", attrs, time.monotonic_ns(), None)
            assert [call.stage for call in recorder.state().spans] == ["barrier", "update"]
        for one in (outside, inside):
            assert one is not None
            one.end_ns = time.monotonic_ns()


@pytest.mark.usefixtures("group")
def test_compiled_code_keeps_them_in_its_graph(config: ProfileConfig) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor + 1

    with capture(1, config=config):
        reduced(torch.ones(2))
    (graph,) = graphs
    assert "all_reduce" in graph.code


@pytest.mark.usefixtures("group")
def test_buckets_of_ddp_have_a_begin_and_are_counted_where_no_rank_waits(config: ProfileConfig) -> None:
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02
    )
    config = config.replace(steps=[1], roles={"*": {"profiler": "off"}})
    torchs: Any = world()
    with capture(1, config=config, role="actor") as step:
        distributed.all_reduce(torch.ones(2))
        before = torchs._get_sequence_number_for_group()
        # As if the group had been made again: the old one had the same name and numbers.
        collective_calls.seen.append(("0", before + 1, time.monotonic_ns() - 300_000_000))
        model(torch.ones(4, 64)).sum().backward()
        buckets = torchs._get_sequence_number_for_group() - before
        distributed.all_reduce(torch.ones(2))
    assert buckets > 0
    assert step.result.wait() is not None
    begins = [span for span in finished_spans(config.save_path) if "begin_only" in (span.attrs or {})]
    numbers = [(span.attrs or {})["sequence"] for span in begins]
    assert numbers == list(range(before + 1, before + buckets + 1))
    timeline = load_step(RunLayout(config.save_path).step(1).root)
    assert unseen_collectives(timeline) == buckets
    page = render_step(timeline, step_report(timeline))
    assert f"{buckets} collectives that Python did not call, such as DDP" in page


@pytest.mark.usefixtures("group")
def test_calls_of_a_group_that_was_made_again_at_once_are_told_apart(
    tmp_path: Path, config: ProfileConfig
) -> None:
    """Python issued the call with the same name and number in the old group, C++ in the new one."""
    with capture(1, config=config):
        since_ns = time.monotonic_ns()
        distributed.all_reduce(torch.ones(2))
        distributed.destroy_process_group()
        store = FileStore(str(tmp_path / "again"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.all_reduce(torch.ones(2))
        new, old = collective_calls.seen.pop(), collective_calls.seen[-1]
        assert new[:2] == old[:2]
        begins_ns = [span.start_ns for span in collective_calls.issued(standing_recorder().log, since_ns)]
    assert begins_ns == [pytest.approx(new[2], abs=20_000_000)]
    assert begins_ns[0] > old[2]


@pytest.mark.usefixtures("group")
def test_a_call_that_python_notes_while_torch_is_asked_is_not_one_of_cpp(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d: Any = torch._C._distributed_c10d
    dump = c10d._dump_fr_trace_json
    with capture(1, config=config):
        since_ns = time.monotonic_ns()
        distributed.all_reduce(torch.ones(2))
        noted = collective_calls.seen.pop()

        def noting(**which: bool) -> str:
            text: str = dump(**which)
            collective_calls.seen.append(noted)
            return text

        monkeypatch.setattr(c10d, "_dump_fr_trace_json", noting)
        assert collective_calls.issued(standing_recorder().log, since_ns) == []


LATE = """
import os, sys, time, torch, torch.distributed as dist
from stepscope import capture, configure, span
folder, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
configure(save_path=f"{folder}/run", steps=[1], roles={"*": {"profiler": "off"}}, counters="off")
dist.barrier()
with capture(1, role="actor") as cap:
    for turn in range(3):
        with span("update", role="actor"):
            time.sleep(1.0 if (rank, turn) == (1, 1) else 0.01)
            dist.all_reduce(torch.ones(2))
cap.result.wait()
dist.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_comes_late_is_named_where_no_span_is_around_the_collective(tmp_path: Path) -> None:
    with ranks(2, LATE, tmp_path) as started:
        ended = [process.communicate(timeout=120)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], ended
    cause = step_report(load_step(tmp_path / "run" / "step_000001")).cause
    assert cause is not None
    assert cause.kind == "late-rank"
    assert cause.ns is not None
    assert cause.process is not None
    assert cause.process.rank == 1
    assert cause.ns > 8e8


DDP_LATE = """
import os, sys, time, torch, torch.distributed as dist
from contextlib import suppress
from stepscope import capture, configure, span
folder, rank, steps = sys.argv[1], int(os.environ["RANK"]), [1] if sys.argv[2] == "captured" else []
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
configure(save_path=f"{folder}/run", steps=steps, roles={"*": {"profiler": "off"}}, counters="off")
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
for step in range(2):
    dist.barrier()
    with suppress(ValueError), capture(step, role="actor") as cap:
        with span("update", role="actor"):
            for turn in range(3):
                time.sleep(0.2 if (rank, turn, step) == (1, 1, 1) else 0.01)
                model(torch.ones(4, 64)).sum().backward()
        if step and not steps:
            raise ValueError("the recorder writes the last steps")
if steps:
    cap.result.wait()
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["captured", "recorded"])
def test_a_rank_that_comes_late_to_the_buckets_of_ddp_is_named(tmp_path: Path, how: str) -> None:
    with ranks(2, DDP_LATE, tmp_path, how) as started:
        ended = [process.communicate(timeout=120)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], ended
    timeline = load_step(tmp_path / "run" / "step_000001")
    report = step_report(timeline)
    assert report.cause is not None
    assert (report.cause.kind, report.cause.process and report.cause.process.rank) == ("late-rank", 1)
    assert (report.cause.ns or 0) > 1.5e8
    (update,) = [stage for stage in report.stages if stage.stage == "update"]
    waited_ns = {share.rank: share.waited_ns for share in update.processes}
    assert waited_ns[0] > 1.5e8 > waited_ns[1]
