"""Digests of traces: the same report, without the traces being opened."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from packages.report.tests import golden
from packages.report.tests.test_kernels import step_with_traces
from packages.report.tests.traces import kernel, op, trace_text
from stepscope.files.layout import StepLayout
from stepscope_report.cli import run
from stepscope_report.report import step_report
from stepscope_report.timeline import digests, load_step, load_traces
from stepscope_report.timeline.activity import traces
from stepscope_report.timeline.activity.content import TraceContent
from stepscope_report.timeline.activity.content_reader import nothing_read
from stepscope_report.timeline.clocks import refine
from stepscope_report.timeline.digests import packed, unpacked


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SMALLEST", 0)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return step_with_traces(tmp_path).write()


def reported(path: Path, *, use: bool = True) -> bytes:
    timeline = load_step(path, digests=use)
    return msgspec.json.encode(step_report(timeline, load_traces(path, timeline, digests=use)))


def kept(path: Path) -> list[Path]:
    return sorted(StepLayout(path).digests.glob("*"))


def no_trace_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(traces, "read_trace", opened)
    monkeypatch.setattr(refine, "read_collectives", opened)


@pytest.mark.parametrize("name", golden.steps())
def test_a_report_from_digests_is_the_report_from_traces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(golden.steps()[name], tmp_path / "step_000002")
    alone = reported(path, use=False)
    assert not kept(path)
    assert reported(path) == alone
    no_trace_is_opened(monkeypatch)
    assert reported(path) == alone


def test_a_clock_by_collectives_needs_no_trace_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copytree(golden.steps()["no_clock"], tmp_path / "step_000002")
    clocks = [process.clock for process in load_step(path).processes]
    assert kept(path)
    no_trace_is_opened(monkeypatch)
    assert [process.clock for process in load_step(path).processes] == clocks


def test_a_trace_that_has_changed_is_read_again(step: Path) -> None:
    before = reported(step)
    trace = max(step.rglob("*.json.gz"), key=lambda file: file.parent.name == "actor")
    status = trace.stat()
    text = trace_text([op("aten::other", 0, 5), kernel("another", 0, 7)])
    other = gzip.compress(text)
    trace.write_bytes(other + bytes(max(0, status.st_size - len(other))))
    os.utime(trace, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = reported(step)
    assert after != before
    assert b"aten::other" in after
    assert after == reported(step, use=False) == reported(step)


def with_fields(**fields: object) -> Callable[[bytes], bytes]:
    return lambda data: packed(json.dumps(json.loads(unpacked(data)) | fields).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: packed(b"[" * 100_000),
        with_fields(format=99),
        with_fields(made_by=["stepscope 0"]),
        with_fields(content={"events": "many"}),
    ],
    ids=["empty", "cut off", "deep", "another format", "another version", "another content"],
)
def test_a_digest_that_cannot_be_used_is_made_again(step: Path, change: Callable[[bytes], bytes]) -> None:
    alone = reported(step)
    whole = {path: path.read_bytes() for path in kept(step)}
    for path, data in whole.items():
        path.write_bytes(change(data))
    assert reported(step) == alone
    assert {path: path.read_bytes() for path in kept(step)} == whole


@pytest.mark.parametrize("group", ["stepscope.readers", "stepscope.iterations"])
def test_a_package_that_reads_files_makes_digests_again(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    reported(step)
    before = {path: path.read_bytes() for path in kept(step)}
    metadata = tmp_path / "site" / "own_reader-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-reader\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nown = own_reader:make\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digests._versions.cache_clear()
    try:
        reported(step)
        after = {path: path.read_bytes() for path in kept(step)}
        assert before.keys() == after.keys()
        assert all(before[path] != after[path] for path in before)
        assert b"own-reader 1.0" in unpacked(next(iter(after.values())))
    finally:
        monkeypatch.undo()
        digests._versions.cache_clear()


def test_a_folder_of_another_user_gets_no_digest(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = step.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    reported(step)
    assert not kept(step)


def test_a_digest_follows_no_link(step: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    StepLayout(step).digests.symlink_to(tmp_path / "elsewhere")
    reported(step)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_digests_reads_the_traces(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads: list[Path] = []

    def read(path: Path, *_: object) -> TraceContent:
        reads.append(path)
        return nothing_read("by the test")

    reported(step)
    monkeypatch.setattr(traces, "read_trace", read)
    run(["report", str(step), "--json"])
    assert not reads
    run(["report", str(step), "--json", "--no-digests"])
    assert reads
    assert "by the test" in capsys.readouterr().out


def test_small_traces_get_none(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SMALLEST", 1 << 18)
    reported(step)
    assert not kept(step)
