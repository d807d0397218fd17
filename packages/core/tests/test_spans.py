"""Spans, from the `with` block to the line on disk.

One file above 400 lines: all cases share one log and its readers.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import stepscope
from stepscope._recording.process.identity import identify
from stepscope._recording.spans import api, scopes
from stepscope._recording.spans.carrier import Carrier, attach, carrier
from stepscope._recording.spans.log import SpanLog
from stepscope._recording.spans.scopes import Place, Scope
from stepscope._recording.spans.span import Span as LiveSpan
from stepscope.files.clock import read_anchor
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import End, Header, Line, Open, Span
from stepscope.files.trace_context import SpanIds
from stepscope_report.timeline.sources import read_spans

ACTOR = ProcessInfo(role="actor", rank=0, world_size=2, host="h", pid=7)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SpanLog]:
    log = SpanLog(tmp_path / "spans.jsonl", process=ACTOR, step=3, run_id="r", limit=1000)
    log.open()
    log.start(read_anchor())
    yield log
    log.close(read_anchor())


def lines(log: SpanLog) -> list[Line]:
    return msgspec.json.Decoder(Line).decode_lines(log.path.read_bytes())


def closed(log: SpanLog) -> list[Span]:
    log.close(read_anchor())
    return [line for line in lines(log) if type(line) is Span]


def wait_for_lines(log: SpanLog, count: int) -> list[Line]:
    """Return the file's lines once the writing thread has written `count` (it polls five times a second)."""
    until = time.monotonic() + 10
    while len(records := lines(log)) < count:
        assert time.monotonic() < until, records
        os.sched_yield()
    return records


def test_a_file_begins_with_who_wrote_it_and_ends_with_how_many(log: SpanLog) -> None:
    with log.new("update"):
        pass
    log.close(read_anchor())
    header, span, end = lines(log)
    assert isinstance(header, Header)
    assert header.process == ACTOR
    assert header.step == 3
    assert isinstance(span, Span)
    assert isinstance(end, End)
    assert (end.spans, end.dropped) == (1, 0)


def test_what_somebody_else_timed_hangs_below_the_span_it_is_added_to(log: SpanLog) -> None:
    with LiveSpan(log, "turn", "agent_loop", None, trajectory="t", turn=1) as turn:
        turn.add("decode", 5_000, 7_500, role="rollout", attrs={"tokens": 3})
    by_stage = {span.stage: span for span in closed(log)}
    decode = by_stage["decode"]
    assert (decode.parent, decode.role) == (by_stage["turn"].span, "rollout")
    assert (decode.start_ns, decode.dur_ns) == (5_000, 2_500)
    assert (decode.trajectory, decode.turn, decode.attrs) == ("t", 1, {"tokens": 3})


def test_without_a_capture_nothing_is_added() -> None:
    with stepscope.span("generate") as nothing:
        nothing.add("decode", 1, 2)


def test_the_clock_of_spans_is_the_monotonic_one(log: SpanLog) -> None:
    before = time.monotonic_ns()
    with log.new("update"):
        inside = time.monotonic_ns()
    after = time.monotonic_ns()
    (span,) = closed(log)
    assert before <= span.start_ns <= inside <= span.start_ns + span.dur_ns <= after


def test_a_trajectory_inside_a_turn_does_not_inherit_the_turn(log: SpanLog) -> None:
    with (
        LiveSpan(log, "trajectory", None, None, trajectory="outer"),
        LiveSpan(log, "turn", None, None, turn=5),
        LiveSpan(log, "trajectory", None, None, trajectory="sub-agent"),
        log.new("generate"),
    ):
        pass
    innermost = next(span for span in closed(log) if span.stage == "generate")
    assert (innermost.trajectory, innermost.turn) == ("sub-agent", None)


def test_an_error_that_cannot_be_printed_does_not_hide_the_users(log: SpanLog) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(UnprintableError), log.new("update"):
        raise UnprintableError
    (span,) = closed(log)
    assert span.error == "UnprintableError"


def test_attributes_can_be_added_while_it_runs(log: SpanLog) -> None:
    with log.new("generate", None, {"tokens": 0, "model": "tiny"}) as span:
        span.set(tokens=17)
    (line,) = closed(log)
    assert line.attrs == {"tokens": 17, "model": "tiny"}


@pytest.mark.parametrize("value", [10**30, "\ud800", object(), {"a": {1, 2}}])
def test_an_attribute_that_is_no_json_is_kept_as_text(log: SpanLog, value: object) -> None:
    with log.new("odd", None, {"value": value}):  # type: ignore[dict-item]  # users do this
        pass
    with log.new("fine"):
        pass
    odd, fine = closed(log)
    assert odd.attrs is not None
    assert isinstance(odd.attrs["value"], str | dict | int)
    assert fine.stage == "fine"


def test_a_bare_thread_takes_its_place_from_a_carrier(log: SpanLog) -> None:
    def work(place: object) -> None:
        with attach(place), log.new("in thread"):  # type: ignore[arg-type]  # any mapping
            pass

    with LiveSpan(log, "trajectory", None, None, trajectory="t9") as root:
        thread = threading.Thread(target=work, args=(carrier(),))
        thread.start()
        thread.join()
    by_stage = {span.stage: span for span in closed(log)}
    inside = by_stage["in thread"]
    assert inside.trajectory == "t9"
    assert inside.link is not None
    assert (inside.link.process, inside.link.span, inside.link.step) == (ACTOR.key, root.id, 3)


def test_threads_do_not_become_each_others_parents(log: SpanLog) -> None:
    barrier = threading.Barrier(8)

    def work(name: str) -> None:
        for _ in range(50):
            with log.new(name):
                barrier.wait()

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = closed(log)
    assert len(spans) == 400
    assert all(span.parent is None for span in spans)
    assert len({span.span for span in spans}) == 400


def test_a_carrier_is_json_and_nothing_is_carried_from_nowhere(log: SpanLog) -> None:
    assert carrier() is None
    with LiveSpan(log, "turn", None, None, trajectory="t", turn=2, policy_version=5):
        carried = carrier()
    assert msgspec.json.decode(msgspec.json.encode(carried)) == carried


@pytest.mark.parametrize("hostile", [{"process": 3, "span": "x"}, {"trajectory": ["a"]}, {"later": True}, {}])
def test_a_carrier_of_another_version_does_no_harm(log: SpanLog, hostile: dict[str, object]) -> None:
    with attach(hostile), log.new("s"):
        pass
    (span,) = closed(log)
    assert span.link is None


def test_attaching_nothing_keeps_the_place(log: SpanLog) -> None:
    with log.new("outer") as outer, attach(None), log.new("inner"):
        pass
    assert next(span for span in closed(log) if span.stage == "inner").parent == outer.id


TURN = Carrier(process="trainer_rank0_elsewhere_pid1", span=7, captured=3, trajectory="t9", turn=2)
OTHER = Carrier(process="trainer_rank0_elsewhere_pid1", span=8, captured=3, trajectory="t10", turn=0)


def test_a_method_that_attaches_hangs_below_its_caller_and_its_spans_below_it(log: SpanLog) -> None:
    with log.new("generate") as method, attach(TURN), log.new("decode"):
        assert carrier() == {
            **TURN,
            "process": ACTOR.key,
            "run": "r",
            "step": 3,
            "span": method.id + 1,
            "traceparent": SpanIds("r", 3, ACTOR.key).traceparent(method.id + 1),
        }
    by_stage = {span.stage: span for span in closed(log)}
    generate, decode = by_stage["generate"], by_stage["decode"]
    assert generate.link is not None
    assert (generate.link.process, generate.link.span) == (TURN["process"], 7)
    assert (generate.trajectory, generate.turn) == ("t9", 2)
    assert (decode.parent, decode.link, decode.trajectory) == (method.id, None, "t9")


def test_the_end_of_a_span_says_the_place_that_its_open_line_could_not_know(log: SpanLog) -> None:
    with log.new("generate"):
        opened = wait_for_lines(log, 2)[1]
        with attach(TURN):
            pass
    (generate,) = closed(log)
    assert isinstance(opened, Open)
    assert (opened.link, opened.trajectory) == (None, None)
    assert generate.link is not None
    assert generate.trajectory == "t9"
    assert read_spans(log.path).spans[generate.span] == generate


def test_a_method_that_attaches_what_began_before_the_capture_belongs_to_it_too(log: SpanLog) -> None:
    early = Carrier(process="elsewhere_pid1", step=4, trajectory="t9", turn=2)
    with log.new("score"), attach(early), log.new("verify"):
        pass
    for span in closed(log):
        assert (span.step, span.trajectory, span.turn, span.link) == (4, "t9", 2, None)


def test_a_span_that_attaches_what_began_before_the_capture_in_its_own_process_keeps_its_place(
    tmp_path: Path,
) -> None:
    own = SpanLog(tmp_path / "mine.jsonl", process=identify("trainer"), step=3, run_id="r", limit=10)
    own.open()
    own.start(read_anchor())
    with api.trajectory("t9"):
        early = carrier()
    with own.new("collect"), attach(early), own.new("score"):
        pass
    by_stage = {span.stage: span for span in closed(own)}
    assert (by_stage["collect"].trajectory, by_stage["score"].trajectory) == (None, "t9")


def test_a_method_that_works_for_several_callers_hangs_below_none_of_them(log: SpanLog) -> None:
    with log.new("generate_batch"):
        for place in (TURN, OTHER):
            with attach(place), log.new("decode"):
                pass
    batch, *decoded = sorted(closed(log), key=lambda span: span.span)
    assert (batch.link, batch.trajectory, batch.turn) == (None, None, None)
    assert [span.trajectory for span in decoded] == ["t9", "t10"]
    assert [span.link and span.link.span for span in decoded] == [7, 8]


def test_a_task_that_attaches_leaves_the_span_it_was_started_in_alone(log: SpanLog) -> None:
    async def handle() -> None:
        with attach(TURN), log.new("decode"):
            pass

    async def main() -> None:
        with log.new("serve"):
            await asyncio.gather(handle(), handle())

    asyncio.run(main())
    by_stage = {span.stage: span for span in closed(log)}
    assert (by_stage["serve"].link, by_stage["serve"].trajectory) == (None, None)
    assert by_stage["decode"].link is not None


def test_a_span_keeps_the_place_it_has(log: SpanLog) -> None:
    carrier = Carrier(process=ACTOR.key, span=1, captured=3)
    with log.new("top"), attach(carrier):
        pass
    with attach(OTHER), log.new("method"), attach(TURN):
        pass
    with LiveSpan(log, "trajectory", None, None, trajectory="own"), attach(TURN):
        pass
    by_stage = {span.stage: span for span in closed(log)}
    assert by_stage["top"].link is None
    assert by_stage["method"].link is not None
    assert by_stage["method"].link.span == 8
    assert by_stage["trajectory"].trajectory == "own"
    assert by_stage["trajectory"].link is None


def test_after_a_method_that_attached_nothing_is_current(log: SpanLog) -> None:
    with log.new("generate"), attach(TURN):
        pass
    assert carrier() is None


FOREIGN = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def test_a_method_that_attaches_another_tracers_headers_hangs_below_its_span(log: SpanLog) -> None:
    with log.new("generate") as method, attach(FOREIGN), log.new("decode"):
        pass
    by_stage = {span.stage: span for span in closed(log)}
    generate, decode = by_stage["generate"], by_stage["decode"]
    assert (generate.traceparent, generate.link) == (FOREIGN["traceparent"], None)
    assert (decode.parent, decode.traceparent) == (method.id, None)


def test_a_process_that_records_nothing_passes_the_context_on() -> None:
    with attach({**TURN, **FOREIGN}):
        assert carrier() == {**TURN, **FOREIGN, "step": 3}
    with attach(FOREIGN):
        assert carrier() == FOREIGN


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        7,
    ],
)
def test_an_invalid_traceparent_is_no_parent(log: SpanLog, header: object) -> None:
    with attach({"traceparent": header}), log.new("s"):
        pass
    (span,) = closed(log)
    assert span.traceparent is None


def test_a_traceparent_of_a_later_version_is_a_parent(log: SpanLog) -> None:
    header = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"
    with attach({"traceparent": header}), log.new("s"):
        pass
    (span,) = closed(log)
    assert span.traceparent == header


def test_a_span_left_open_by_an_earlier_capture_becomes_a_link(log: SpanLog, tmp_path: Path) -> None:
    later = SpanLog(tmp_path / "later.jsonl", process=ACTOR, step=4, run_id="r", limit=10)
    later.open()
    later.start(read_anchor())
    with log.new("long rollout") as old, later.new("update"):
        pass
    (span,) = closed(later)
    assert span.parent is None
    assert span.link is not None
    assert (span.link.span, span.link.step) == (old.id, 3)


def test_a_scope_closed_in_another_context_does_no_harm() -> None:
    async def enter(scope: Scope) -> None:
        scope.__enter__()

    async def leave(scope: Scope) -> None:
        scope.__exit__(None, None, None)

    async def main() -> None:
        scope = Place(trajectory="t")
        await asyncio.create_task(enter(scope))
        await asyncio.create_task(leave(scope))

    asyncio.run(main())


def test_a_full_disk_leaves_whole_lines_and_a_count(log: SpanLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")
    with log.new("before"):
        pass
    wait_for_lines(log, 2)
    real, room = os.write, [40]

    def full(fd: int, data: bytes) -> int:
        # What the kernel does when the disk fills up: takes what fits, then refuses.
        if fd != log._fd:
            return real(fd, data)
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", full)
    with log.new("lost"):
        pass
    log.close(read_anchor())
    stages = [line.stage for line in lines(log) if isinstance(line, Span)]
    assert stages == ["before"]
    assert log.dropped == 1
    assert log.failed is not None
    assert "No space left" in log.failed


# What users put into spans.


class BrokenText:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_numbers_of_numpy_stay_numbers(log: SpanLog) -> None:
    numpy = pytest.importorskip("numpy")
    with log.new("update") as span:
        span.set(loss=numpy.float64(1.5), tokens=numpy.int64(7), mean=numpy.float32(0.5))
    (line,) = closed(log)
    assert line.attrs == {"loss": 1.5, "tokens": 7, "mean": 0.5}


def test_what_is_set_is_what_it_was_then(log: SpanLog) -> None:
    numpy = pytest.importorskip("numpy")
    total = numpy.zeros(())
    with log.new("update") as span:
        span.set(loss=total)
        total += 5
    (line,) = closed(log)
    assert line.attrs == {"loss": 0.0}


def test_one_span_that_cannot_be_written_costs_no_other(log: SpanLog) -> None:
    with log.new("odd", None, {"value": BrokenText()}):  # type: ignore[dict-item]  # users do this
        pass
    with log.new(7, 5):  # type: ignore[arg-type]  # and this
        pass
    with log.new("fine"):
        pass
    odd, numbers, fine = closed(log)
    assert odd.attrs == {"value": "<BrokenText>"}
    assert (numbers.stage, numbers.role, fine.stage) == ("7", "5", "fine")


def test_a_step_that_is_no_int_is_recorded_as_one_or_not_at_all() -> None:
    numpy = pytest.importorskip("numpy")
    with api.trajectory("t", step=numpy.int64(4)) as four, api.turn("x"):  # type: ignore[arg-type]
        assert type(four.step) is int
        assert scopes.inherited(scopes.current.get()) == (None, 4, None, "t", None)


def test_a_log_lets_go_of_a_span_that_outlives_it(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "s.jsonl", process=ACTOR, step=3, run_id="r", limit=10)
    log.open()
    log.start(read_anchor())
    running = log.new("long rollout")
    running.__enter__()
    log.close(read_anchor())
    for thread in threading.enumerate():
        if thread.name == "stepscope-spans":  # its thread ends by itself
            thread.join(10)
    with log.new("late"):
        pass
    watched = weakref.ref(log)
    running.__exit__(None, None, None)
    del log, running
    gc.collect()
    assert watched() is None


def test_the_garbage_collector_has_no_spans_to_walk_through(log: SpanLog) -> None:
    with log.new("outer", None, {"tokens": 3}) as outer, log.new("inner") as inner:
        assert not gc.is_tracked(outer)
        assert not gc.is_tracked(inner)


def test_a_span_that_another_context_leaves_ends_and_the_others_stay_in_place(log: SpanLog) -> None:
    with log.new("outer") as outer:
        with log.new("inner") as inner:
            contextvars.Context().run(inner.__exit__, None, None, None)
            assert inner.end_ns is not None
            assert scopes.current.get() is inner
        assert scopes.current.get() is outer
    assert scopes.current.get() is None


def test_scopes_that_are_left_in_another_order_leave_nothing_behind(log: SpanLog) -> None:
    outer, inner = log.new("outer"), log.new("inner")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert scopes.current.get() is None
    inner.__exit__(None, None, None)
    assert {span.stage for span in closed(log)} == {"outer", "inner"}


def test_a_turn_that_nobody_records_may_learn_its_policy_version_later() -> None:
    with api.trajectory("t"), api.turn(1) as turn:
        turn.policy_version = 4
        assert scopes.inherited(scopes.current.get()) == (None, None, 4, "t", 1)
