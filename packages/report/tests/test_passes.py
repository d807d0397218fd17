"""Reports of hand-made files of forward passes."""

from __future__ import annotations

import gzip
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.report.tests.steps import MS, close
from packages.report.tests.traces import add_trace, event, kernel
from stepscope.engines import passes
from stepscope.engines.passes import PassLog, PassRing
from stepscope.errors import RecordError
from stepscope.files.passes import PassFile, check_passes
from stepscope.files.spans import CONSUME
from stepscope.testing.engine_conformance import a_capture
from stepscope.testing.steps import FakeProcess, StepFolder
from stepscope_report import step_report
from stepscope_report.sections.batches import step_batches
from stepscope_report.sections.requests import step_requests, turn_times
from stepscope_report.timeline import Timeline, load_step, merge_step
from stepscope_report.timeline.merge.merge import EVERYTHING
from stepscope_report.timeline.passes import linked_requests

TABLES = ("requests", "passes", "served", "preempted")


def a_step(root: Path, turns: list[tuple[str, int, int, dict[str, Any]]]) -> StepFolder:
    """Return a step of turns: (trajectory, start and end in ms, attributes), and two replicas."""
    folder = StepFolder(root)
    driver = folder.process("agent_loop", owner=True)
    for name, start, end, attrs in turns:
        whole = driver.span("trajectory", start * MS, end * MS, trajectory=name)
        driver.span(
            "turn", start * MS, end * MS, trajectory=name, turn=0, parent=whole, attrs=attrs, policy_version=6
        )
    for number in (0, 1):
        folder.process("rollout", number, replica=number)
    close(folder, 200 * MS)
    folder.write()
    return folder


def note(folder: StepFolder, process: FakeProcess, replica: int, log: PassLog) -> None:
    """Write a log of times in ms after the opening as the passes of a replica on a process' host."""
    capture = msgspec.structs.replace(
        a_capture(folder.layout.root, replica=replica), step=folder.step, run_id=folder.run_id, passes=1000,
        out_dir=str(folder.layout.engine_dir(replica)), step_dir=str(folder.layout.root),
    )  # fmt: skip
    anchor = process.anchor(0)
    file = log.file()
    at = {
        name: [anchor.mono_ns + ms * MS for ms in getattr(file.passes, name)]
        for name in ("begin_ns", "end_ns")
    }
    weights = [anchor.mono_ns + ms * MS for ms in file.weights.at_ns]
    arrived = [None if ms is None else anchor.mono_ns + ms * MS for ms in file.requests.arrived_ns]
    placed = msgspec.structs.replace(
        file, host=process.info.host, anchor=anchor, closed=process.anchor(200 * MS),
        passes=msgspec.structs.replace(file.passes, **at),
        requests=msgspec.structs.replace(file.requests, arrived_ns=arrived),
        weights=msgspec.structs.replace(file.weights, at_ns=weights),
    )  # fmt: skip
    passes.publish_passes(placed, capture)


def a_log() -> PassLog:
    """Return passes: a and b decode, then a alone; b is preempted, and comes back with three others."""
    log = PassLog(100)
    log.arrive("a", at_ns=10)
    log.arrive("b", at_ns=12)
    log.note(20, 30, "prefill", {"a": 8, "b": 4}, [1, 0], running=2, waiting=0)
    log.note(30, 34, "mixed", {"a": 1, "b": 4}, [1, 1], running=2, waiting=0)
    log.note(36, 40, "decode", {"a": 1}, [1], running=1, waiting=1, preempted=["b"])
    log.note(40, 45, "decode", {"a": 1}, [1], running=1, waiting=1)
    log.note(50, 60, "mixed", {"b": 9, "c": 1, "d": 1, "e": 1}, [1, 1, 1, 1], running=4, waiting=0)
    return log


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    folder = a_step(tmp_path, [("one", 5, 50, {"request_id": "a"}), ("two", 5, 70, {"request_id": "b"})])
    note(folder, folder.processes[1], 0, a_log())
    return load_step(folder.layout.root)


def test_the_time_of_a_turn_is_what_its_engine_did_and_the_rest(timeline: Timeline) -> None:
    turns = turn_times(timeline, ["one", "two"])
    ((one,), (two,)) = turns["one"], turns["two"]
    a = {name: ns // MS for name, ns in msgspec.structs.asdict(one.engine).items() if ns}
    b = {name: ns // MS for name, ns in msgspec.structs.asdict(two.engine).items() if ns}
    assert a == {
        "queued_ns": 10,
        "prefill_ns": 10,
        "few_ns": 4,
        "alone_ns": 11,
    }  # 2 ms before a pass are its own
    assert b == {"queued_ns": 8, "prefill_ns": 14, "many_ns": 10, "preempted_ns": 16}
    assert (one.outside_ns, two.outside_ns) == (10 * MS, 17 * MS)
    assert (one.tokens, two.tokens) == (4, 2)


def test_batches_are_counted_by_size_and_the_thin_end_of_the_rollout_is_named(timeline: Timeline) -> None:
    (batches,) = step_batches(timeline)
    sizes = {(size.least, size.most): (size.passes, size.ns // MS, size.tokens) for size in batches.sizes}
    assert sizes == {(1, 1): (2, 9, 2), (2, 2): (1, 4, 2), (4, 4): (1, 10, 4)}
    assert (batches.requests, batches.linked, batches.preemptions) == (5, 2, 1)
    assert (batches.prefill_ns, batches.thin_ns) == (10 * MS, 0)


def test_advice_is_given_where_passes_show_what_it_saves_and_else_not(tmp_path: Path) -> None:
    """Eight requests decode. At the end two of them go on alone, prompts are read in between, or others
    wait.
    """
    plain, thin, held, queued = ([(10 * n, "decode", 8) for n in range(10)] for _ in range(4))
    thin[6:] = [(60 + 10 * n, "decode", 2) for n in range(4)]
    held[2::2] = [(10 * n, "prefill", 1) for n in (2, 4, 6, 8)]
    saved = {}
    for name, course in (("plain", plain), ("thin", thin), ("held", held), ("queued", queued)):
        folder, log = a_step(tmp_path / name, []), PassLog(100)
        for begin, kind, requests in course:
            served = {f"r{n}": 1 for n in range(requests)}
            waits = 4 * (name == "queued")
            log.note(begin, begin + 10, kind, served, [1] * requests, running=8, waiting=waits)  # type: ignore[arg-type]  # a literal
        note(folder, folder.processes[1], 0, log)
        advice = step_report(load_step(folder.layout.root)).advice
        saved[name] = {one.rule: (one.saves_ns or 0) // MS for one in advice}
    ours = {"thin-batches", "prefill-alone", "queueing"}
    assert not ours & saved["plain"].keys()
    assert (saved["thin"]["thin-batches"], saved["held"]["prefill-alone"]) == (40, 40)
    assert ours & saved["queued"].keys() == {"queueing"}
    assert len(ours & saved["thin"].keys()) == len(ours & saved["held"].keys()) == 1


@pytest.mark.parametrize(("attrs", "linked"), [({}, 0), ({"replica": 1}, 1)], ids=["unnamed", "named"])
def test_engines_that_number_their_requests_alike_are_never_mixed(
    tmp_path: Path, attrs: dict[str, Any], linked: int
) -> None:
    folder = a_step(tmp_path, [("one", 5, 50, {"request_id": "0", **attrs})])
    for replica in (0, 1):
        log = PassLog(10)
        log.note(20, 30, "decode", {"0": 1}, [1], running=1, waiting=0)
        note(folder, folder.processes[1 + replica], replica, log)
    timeline = load_step(folder.layout.root)
    links = linked_requests(timeline)
    assert [timeline.passes[key.engine].replica for key in links] == [1] * linked


def test_a_teacher_of_the_same_number_names_no_request_of_the_student(tmp_path: Path) -> None:
    folder = a_step(tmp_path, [("one", 5, 50, {"request_id": "0", "replica": 0})])
    driver = folder.processes[0]
    for role, start, name in (("rollout", 5, "one"), ("teacher", 60, "scored by the teacher")):
        call = driver.span("generate", start * MS, 90 * MS, role=role, trajectory=name, attrs={"replica": 0})
        driver.span(
            "prefill", start * MS, 80 * MS, role="rollout", trajectory=name, parent=call,
            attrs={"request_id": "0"},
        )  # fmt: skip
    folder.write()
    log = PassLog(10)
    log.note(20, 30, "decode", {"0": 1}, [1], running=1, waiting=0)
    note(folder, folder.processes[1], 0, log)
    timeline = load_step(folder.layout.root)
    assert timeline.shared_numbers == {("teacher", 0)}
    (index,) = linked_requests(timeline).values()
    assert timeline.spans[index].trajectory == "one"


@pytest.mark.parametrize(("wanted", "arrows"), [(None, 10), ("all", 12)])
def test_a_merge_has_the_passes_and_arrows_of_the_slowest_trajectories_unless_all_are_wanted(
    tmp_path: Path, wanted: Any, arrows: int
) -> None:
    folder = a_step(tmp_path, [(f"t{n}", 5, 50 + n, {"request_id": f"r{n}"}) for n in range(12)])
    log = PassLog(10)
    log.note(20, 30, "decode", {f"r{n}": 1 for n in range(12)}, [1] * 12, running=12, waiting=0)
    note(folder, folder.processes[1], 0, log)
    to = tmp_path / "merged.json.gz"
    merge_step(folder.layout.root, to=to, selection=msgspec.structs.replace(EVERYTHING, requests=wanted))
    with gzip.open(to) as file:
        events = json.load(file)["traceEvents"]
    (drawn,) = [event for event in events if event.get("cat") == "pass"]
    assert (drawn["name"], drawn["dur"]) == ("decode 12", 10_000)
    assert sum(event["ph"] == "s" and event["name"] == "pass" for event in events) == arrows


def test_a_request_has_the_weights_of_each_of_its_tokens_and_the_step_that_trains_on_it(
    tmp_path: Path,
) -> None:
    """Weights change at 30 ms. Request a runs before and after, with three and two tokens; b before."""
    folder = a_step(tmp_path, [(f"t{name}", 5, 80, {"request_id": name}) for name in ("a", "b", "c")])
    driver = folder.processes[0]
    driver.span("sync_weights", 20 * MS, 32 * MS, role="trainer", policy_version=7)
    driver.span("update_actor", 90 * MS, 150 * MS, role="trainer", policy_version=7)
    for name, ms in (("a", 85), ("b", 86)):
        driver.span(CONSUME, ms * MS, ms * MS, trajectory=f"t{name}", attrs={"begun_version": 6})
    folder.write()
    log = PassLog(10)
    for begin in (10, 15, 20):
        log.note(begin, begin + 5, "decode", {"a": 1, "b": 1}, [1, 1], running=2, waiting=0)
    log.update(30)
    for begin in (40, 50):
        log.note(begin, begin + 5, "decode", {"a": 1, "c": 1}, [1, 1], running=2, waiting=0)
    note(folder, folder.processes[1], 0, log)
    a, b, c = step_requests(load_step(folder.layout.root))
    assert (a.version_begun, a.version_ended, a.trained_by) == (6, 7, 2)
    assert [(lag.versions, lag.tokens) for lag in a.lags] == [(0, 2), (1, 3)]
    assert (b.version_begun, b.version_ended, b.trained_by) == (6, 6, 2)
    assert (c.version_begun, c.version_ended, c.trained_by, c.lags) == (7, 7, None, ())


def test_weights_without_a_version_have_the_number_of_their_update(tmp_path: Path) -> None:
    folder = a_step(tmp_path, [])
    log = PassLog(10)
    for count, (served, stated) in enumerate(
        (("ab", None), ("ac", "9"), ("cd", "9"), ("de", "9"), ("e", "10")), 3
    ):
        log.note(
            10 * count, 10 * count + 5, "decode", dict.fromkeys(served, 1), [1] * len(served), running=2,
            waiting=0, updates=count, weights=stated,
        )  # fmt: skip
        log.update(10 * count + 7)
    note(folder, folder.processes[1], 0, log)
    rows = step_requests(load_step(folder.layout.root))
    told = {row.id: (row.version_begun, row.version_ended) for row in rows}
    assert told == {
        "a": ("update 3", 9),
        "b": ("update 3", "update 3"),
        "c": (9, "update 5"),
        "d": ("update 5", "update 6"),
        "e": ("update 6", 10),
    }


def test_passes_beyond_the_limit_are_counted() -> None:
    log = PassLog(2)
    for at in range(5):
        log.note(at, at + 1, "decode", {"a": 1}, [1], running=1, waiting=0)
    file = log.file()
    assert (len(file.passes.number), len(file.served.request), file.dropped) == (2, 2, 3)


def test_a_ring_keeps_the_latest_passes_within_its_memory_and_a_part_of_it_fits_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The requests and the window lie across several parts of the ring. `long` is in each pass."""
    monkeypatch.setattr(passes, "_PART_BYTES", 1 << 17)
    ring, every, zero_ns = PassRing(1), PassLog(100_000), time.monotonic_ns() + 10**9
    for log in (ring, every):
        log.name("long", "a long turn")
    for at in range(10_000):
        began_ns, tokens = zero_ns + 100 * at, {f"r{at}": 2, f"r{at - 1}": 1, "long": 1}
        for log in (ring, every):
            # while the pass runs: its note, which comes later, may be the first of a part
            log.arrive(f"r{at + 1}", caller_id=f"turn {at + 1}", at_ns=began_ns + 20)
            if at % 300 > 200:
                log.update(began_ns + 20)
            log.note(
                began_ns + 10, began_ns + 90, "decode", tokens, [1, 1, 1], running=3, waiting=0,
                weights=at // 300, updates=at // 200, preempted=[f"r{at}"] if at % 10 == 9 else [],
            )  # fmt: skip
    kept, whole = ring.file(), every.file()
    assert 1_900 < len(kept.passes.number) < 2_400
    assert kept.anchor.mono_ns == kept.passes.begin_ns[0]
    parts = []
    for file in (kept, whole):
        ahead_ns = file.closed.wall_ns - file.closed.mono_ns + zero_ns
        parts.append(passes.between(file, ahead_ns + 810_000, ahead_ns + 990_000))
        check_passes(parts[-1])
    one, other = (msgspec.to_builtins(part) for part in parts)
    for own in (one, other):
        for table in ("passes", "preempted"):
            del own[table]["number"]  # counted from the oldest kept pass
    assert other["requests"]["id"][0] == "long"
    oldest = 10_000 - len(kept.passes.number)
    came = kept.requests.arrived_ns[kept.requests.id.index(f"r{oldest + 1}")]
    assert came == zero_ns + 100 * oldest + 20
    later = bisect_right(whole.weights.at_ns, kept.anchor.mono_ns)
    assert kept.weights.at_ns == whole.weights.at_ns[later:]
    assert kept.weights.version == whole.weights.version[later:]
    other["requests"]["version_begun"][0] = None if oldest % 300 > 200 else oldest // 300
    other["requests"]["updates_begun"][0] = oldest // 200
    assert [one[table] for table in TABLES] == [other[table] for table in TABLES]
    assert one["passes"]["begin_ns"] == [zero_ns + 810_010 + 100 * at for at in range(1800)]
    assert one["requests"]["caller_id"][0] == "a long turn"
    assert len(one["preempted"]["request"]) == 180


def test_a_copy_of_a_full_ring_holds_the_engine_up_less_than_its_file_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy for a window at the end leaves out the parts before the first pass of the window's requests."""
    monkeypatch.setattr(passes, "_PART_BYTES", 1 << 17)
    ring, zero_ns = PassRing(8), time.monotonic_ns()
    for at in range(6_000):
        began_ns, group = zero_ns + 100 * at, at // 500
        if not at % 500:
            ring.update(began_ns)
            for number in range(64):
                ring.arrive(f"{group}-{number}", caller_id=f"turn {group}-{number}", at_ns=began_ns)
        batch = {f"{group}-{number}": 1 for number in range(64)}
        ring.note(began_ns, began_ns + 90, "decode", batch, [1] * 64, running=64, waiting=0, weights=group)

    def seconds(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    def as_a_file() -> bytes:
        return passes.encoded(ring.file())

    copying = min(seconds(lambda: ring.copy().packed()) for _ in range(5))
    assert copying < min(seconds(as_a_file) for _ in range(3)) / 5
    whole = ring.file()
    ahead_ns = whole.closed.wall_ns - whole.closed.mono_ns
    late = passes.unpacked_copy(ring.copy(ahead_ns + zero_ns + 100 * 5_900).packed()).file()
    assert len(late.passes.number) < len(whole.passes.number) / 4
    parts = []
    for file in (late, whole):
        since_ns = file.closed.wall_ns - file.closed.mono_ns + zero_ns + 100 * 5_900
        parts.append(passes.between(file, since_ns, since_ns + 9_000))
    one, other = (msgspec.to_builtins(part) for part in parts)
    for own in (one, other):
        del own["passes"]["number"]
    assert len(one["passes"]["begin_ns"]) == 90
    assert [one[table] for table in TABLES] == [other[table] for table in TABLES]
    assert one["requests"]["version_begun"] == [11] * 64


OTHERS = ("begin_ns", "end_ns", "kind", "requests", "running", "waiting", "kv_use")


@pytest.mark.parametrize(
    "change",
    [
        {"served": {"request": [0], "tokens": [1], "output": [1]}},
        {"preempted": {"number": [0], "request": [9]}},
        {"passes": {"number": [1], **{name: [] for name in OTHERS}}},
    ],
    ids=list("abc"),
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    good = msgspec.to_builtins(a_log().file())
    check_passes(msgspec.convert(good, PassFile))
    with pytest.raises(RecordError):
        check_passes(msgspec.convert({**good, **change}, PassFile))


def test_a_damaged_file_costs_its_passes_alone(timeline: Timeline, tmp_path: Path) -> None:
    (file,) = tmp_path.rglob("*_passes.json.gz")
    file.write_bytes(file.read_bytes()[:-20])
    read = load_step(file.parents[3])
    assert read.passes == ()
    assert any("no passes" in problem.what for problem in read.problems)
    assert read.spans


def test_files_that_an_engine_left_are_taken_and_a_damaged_one_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = passes.encoded(a_log().file())
    for stem, data in (("x_0", content), ("x_1", content[:-20]), ("y_0", content)):
        passes.write(data, tmp_path, stem)
    (taken,) = passes.take(tmp_path, "x_*")
    assert taken.passes.number == a_log().file().passes.number
    assert [path.name[:3] for path in tmp_path.iterdir()] == ["y_0"]
    assert "forward passes are" in caplog.text
    assert "x_1" in caplog.text


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    log, begun = PassLog(9), threading.Event()

    def caller_of(request: str) -> str:
        begun.wait()
        return f"caller of {request}"

    log.note(1, 2, "decode", {"a": 1}, [1], running=1, waiting=0)
    folder = tmp_path / "not made yet"
    passes.write_apart(log.copy(dp=1), folder, "x_dp1", caller_of)
    threading.Timer(0.2, begun.set).start()
    assert passes.take(folder, "y_*") == []
    assert not begun.is_set()
    (taken,) = passes.take(folder, "x_*")
    assert (taken.dp, taken.requests.caller_id) == (1, ["caller of a"])
    assert list(folder.iterdir()) == []


def test_a_pass_points_to_what_it_launched_first_also_where_it_was_launched_ahead(tmp_path: Path) -> None:
    """The second pass is launched, as a graph, while the first runs. The third has no work on the device."""
    folder = a_step(tmp_path, [(name, 5, 90, {"request_id": name}) for name in "ab"])
    log = PassLog(10)
    log.note(10, 30, "prefill", {"a": 8}, [1], running=1, waiting=0)
    log.note(30, 50, "decode", {"a": 1, "b": 1}, [1, 1], running=2, waiting=0)
    log.note(50, 60, "decode", {"b": 1}, [1], running=1, waiting=0)
    note(folder, folder.processes[1], 0, log)

    def flow(phase: str, number: int, ms: float, pid: int, tid: int) -> dict[str, Any]:
        end = {"bp": "e"} if phase == "f" else {}
        common = {"cat": "ac2g", "name": "ac2g", "id": number, "pid": pid, "tid": tid, "ts": ms * 1000}
        return {"ph": phase, **common, **end}

    annotations = [
        ("execute_context_1(8)_generation_0(0)", 11, 6), ("execute_context_0(0)_generation_2(2)", 20, 5),
        ("step[DECODE bs=1]", 21, 1),
        ("execute_context_0(0)_generation_1(1)", 51, 5),
    ]  # fmt: skip
    kernels = [(1, 12, "gemm", 13), (2, 14, "norm", 16), (3, 21, "graph, later", 36), (3, 21, "graph", 32)]
    events: list[Any] = [
        {**event(name, "user_annotation", ms * 1000, dur * 1000), "args": {"External id": 7}}
        for name, ms, dur in annotations
    ]
    for number, launched, name, ms in kernels:
        events += [
            flow("s", number, launched, 1, 1),
            flow("f", number, ms, 0, 7),
            kernel(name, ms * 1000, 1000),
        ]
    add_trace(folder, folder.processes[1], events)
    to = tmp_path / "merged.json.gz"
    merge_step(folder.write(), to=to, selection=msgspec.structs.replace(EVERYTHING, requests="all"))
    with gzip.open(to) as file:
        merged = json.load(file)["traceEvents"]
    names = {
        (one["pid"], one["tid"], one["ts"]): one["name"]
        for one in merged
        if one.get("cat") in ("kernel", "pass")
    }
    arrows: dict[int, list[str]] = {}
    for one in merged:
        if one.get("name") == "first kernel":
            arrows.setdefault(one["id"], []).append(names[one["pid"], one["tid"], one["ts"]])
    assert sorted(arrows.values()) == [["decode 2", "graph"], ["prefill 1", "gemm"]]
