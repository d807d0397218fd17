"""Span files and parts in every state that crashes, full disks and strangers leave them in."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.report.tests.steps import MS, printed
from stepscope.errors import RecordError
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder
from stepscope_report import step_report
from stepscope_report.timeline import Timeline, load_step


def folder_of(tmp_path: Path) -> tuple[Path, FakeProcess]:
    """Return a step with a driver (one span) and an actor (three spans, with files to break)."""
    folder = StepFolder(tmp_path)
    driver = folder.process("trainer", owner=True)
    driver.span("step", 0, 9 * MS)
    actor = folder.process("actor", 0)
    for index in range(3):
        actor.span(f"stage{index}", index * MS, (index + 1) * MS)
    for process in (driver, actor):
        process.close(10 * MS)
    return folder.write(), actor


def problems(timeline: Timeline) -> list[tuple[str, int | None]]:
    """Return the first two words of each problem, and its number of lines."""
    return [(" ".join(problem.what.split()[:2]), problem.lines) for problem in timeline.problems]


def stages(timeline: Timeline) -> list[str]:
    return [span.stage for span in timeline.spans]


def edit(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "has_part", "left", "noted"),
    [
        (lambda lines: [*lines[:3], lines[3][:40]], True, "01", [("last line", 1)]),
        (lambda lines: [lines[0], *lines[2:]], True, "12", [("spans lost:", 1)]),
        (lambda lines: [lines[0], b"x" * (9 << 20) + b"\n", *lines[1:]], True, "012", [("lines that", 3)]),
        (lambda lines: lines[1:], True, "012", [("no header", None)]),
        (lambda lines: lines[1:], False, "", [("no header", None), ("left out:", 3)]),
        (lambda lines: [], True, "", [("empty", None)]),
        (lambda lines: lines, False, "012", []),
    ],
    ids=["cut off", "line gone", "pieces of 4 MiB", "no header", "no header, no part", "empty", "no part"],
)
def test_what_is_left_of_a_process_is_read_and_the_rest_is_noted(
    tmp_path: Path,
    change: Callable[[list[bytes]], list[bytes]],
    has_part: bool,
    left: str,
    noted: list[tuple[str, int | None]],
) -> None:
    path, actor = folder_of(tmp_path)
    edit(actor.span_path, change)
    if not has_part:
        actor.part_path.unlink()
    timeline = load_step(path)
    assert stages(timeline) == ["step", *(f"stage{number}" for number in left)]
    assert problems(timeline) == noted
    assert {problem.file for problem in timeline.problems} <= {f"spans/{actor.span_path.name}"}
    found = [process for process in timeline.processes if process.info == actor.info]
    assert [process.cost is None for process in found] == ([not has_part] if left or has_part else [])


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\x00 not utf-8\n",
        b'{"kind":"open","span":9,"role":"\xff","stage":"s","start_ns":1}\n',
        b'{"kind":"from the future","span":9}\n',
        b'{"kind":"span","span":"nine"}\n',
        b"[" * 200_000 + b"\n",
        b"\n",
        b"null\n",
        b'{"kind":"span","span":9,"role":"r","stage":"s","start_ns":5,"dur_ns":"long"}\n',
    ],
    ids=["bytes", "utf8", "kind", "types", "nested", "blank", "null", "duration"],
)
def test_a_line_that_is_no_record_is_counted_and_the_rest_is_used(tmp_path: Path, garbage: bytes) -> None:
    path, actor = folder_of(tmp_path)
    edit(actor.span_path, lambda lines: [lines[0], garbage, *lines[1:], garbage])
    timeline = load_step(path)
    assert stages(timeline) == ["step", "stage0", "stage1", "stage2"]
    assert problems(timeline) == [("lines that", 2)]


@pytest.mark.parametrize("number", ["-5", "9" * 25, f"{1 << 62}"])
def test_a_span_with_impossible_times_is_left_out(tmp_path: Path, number: str) -> None:
    path, actor = folder_of(tmp_path)
    line = f'{{"kind":"span","span":9,"role":"r","stage":"s","start_ns":5,"dur_ns":{number}}}\n'.encode()
    edit(actor.span_path, lambda lines: [*lines, line])
    timeline = load_step(path)
    assert stages(timeline) == ["step", "stage0", "stage1", "stage2"]
    assert problems(timeline) == [("spans with", 1)]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    ("start_ns", "end_ns"), [(MS, 10**18), (-9 * 10**12, MS), (8 * 10**12, 9 * 10**12)], ids=str
)
def test_a_span_of_another_clock_is_left_out_and_counted(
    folder: StepFolder, start_ns: int, end_ns: int, closed: bool
) -> None:
    """`span.add` is given any times: those of `time.time_ns()`, or of a counter that begins elsewhere."""
    driver = folder.process("trainer", owner=True)
    generate = driver.span("generate", 0, 5 * MS)
    driver.span("decode", start_ns, end_ns, parent=generate)
    if closed:
        driver.close(10 * MS)
    path = folder.write()
    os.utime(driver.span_path, ns=(OPENED_NS + 10 * MS, OPENED_NS + 10 * MS))
    timeline = load_step(path)
    assert stages(timeline) == ["generate"]
    assert timeline.window.wall_ns == (10 * MS if closed else 5 * MS)
    assert (f"spans/{driver.span_path.name}", 1) in [(one.file, one.lines) for one in timeline.problems]


def test_a_broken_part_is_named(tmp_path: Path) -> None:
    path, actor = folder_of(tmp_path)
    actor.part_path.write_bytes(actor.part_path.read_bytes()[:50])
    timeline = load_step(path)
    (problem,) = timeline.problems
    assert problem.file == f"processes/{actor.part_path.name}"
    assert "truncated" in problem.what
    assert stages(timeline) == ["step", "stage0", "stage1", "stage2"]


def test_a_file_of_another_step_is_left_out(tmp_path: Path) -> None:
    path, _ = folder_of(tmp_path)
    stray = StepFolder(tmp_path / "elsewhere", step=7).process("actor", 0, pid=5)
    stray.span("stray", 0, MS)
    stray.write()
    (path / "spans" / stray.span_path.name).write_bytes(stray.span_path.read_bytes())
    timeline = load_step(path)
    assert "stray" not in stages(timeline)
    assert problems(timeline) == [("left out:", None)]
    assert "step 7" in timeline.problems[0].what


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    path, _ = folder_of(tmp_path)
    (path / "spans" / "odd.jsonl").mkdir()
    assert problems(load_step(path))[0][0] == "cannot be"


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_anything_of_a_capture_is_an_error(tmp_path: Path, make: bool) -> None:
    step = tmp_path / "step_000001"
    if make:
        (step / "spans").mkdir(parents=True)
    with pytest.raises(RecordError, match="holds no records"):
        load_step(step)


@pytest.mark.parametrize("seed", range(100))
def test_no_damage_to_the_files_is_an_exception(tmp_path: Path, seed: int) -> None:
    path, actor = folder_of(tmp_path)
    chance = random.Random(seed)
    for target in (actor.span_path, actor.part_path):
        data = bytearray(target.read_bytes())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    data[at] = ord(chance.choice("0123456789"))
                case 2:
                    del data[at : at + chance.randint(1, 200)]
                case _:
                    data[at:at] = chance.choice([b"9" * 30, b"\n", b"null", b'"', b"{}", b"1e308"])
            data = data or bytearray(b"x")
        target.write_bytes(data)
    timeline = load_step(path)
    assert "step" in stages(timeline)
    report = step_report(timeline)
    assert sum(line.wall_ns for line in report.breakdown.lines) == report.breakdown.window_ns
    assert printed(report)
