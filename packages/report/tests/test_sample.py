"""The sample run that comes with the package: complete, small, and free of the machine that recorded it."""

from __future__ import annotations

import gzip
import re
import zipfile
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import Sidecar
from stepscope.files.storage import read_record
from stepscope_report.demo import ARCHIVE, unpack_sample

pytestmark = pytest.mark.slow

OWN_PATH = re.compile(rb"/(?:root|work|home|Users|tmp|opt|usr)/[\w.-]")


def test_the_report_of_the_sample_is_that_of_a_complete_rl_run(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = command("report", "--sample")
    assert {"decode", "update_actor", "compute_ref_log_prob", "prefill"} <= set(printed.out.split())
    assert printed.err.startswith("The sample is ")
    assert "outputs/sample/report.html" in printed.err


def test_the_sample_has_traces_of_trainers_and_of_replicas(tmp_path: Path, command: Command) -> None:
    assert "aten::mm" in command("report", "--sample", tmp_path, "--step", "1", "--no-html").out
    command("merge", tmp_path / "step_000001")


def test_the_sample_is_shown_again_in_its_folder_and_in_no_other_run(
    tmp_path: Path, command: Command
) -> None:
    for _ in range(2):
        command("report", "--sample", tmp_path / "sample", "--no-html", "--no-traces")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    assert "name an empty" in command("report", "--sample", tmp_path / "other", code=1).err
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["run.json"]


def test_the_sizes_in_the_records_of_the_sample_are_those_of_its_files(tmp_path: Path) -> None:
    unpack_sample(tmp_path)
    sizes = {
        step.root / sidecar.artifact.path: sidecar.artifact.size_bytes
        for step in RunLayout(tmp_path).steps().values()
        for sidecar in (read_record(path, Sidecar) for path in step.sidecars())
    }
    assert len(sizes) == 14
    assert {path: path.stat().st_size for path in sizes} == sizes


def test_the_sample_is_small_and_names_no_machine() -> None:
    assert ARCHIVE.stat().st_size < 3_000_000
    with zipfile.ZipFile(ARCHIVE) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            text = gzip.decompress(data) if name.endswith(".gz") else data
            assert not OWN_PATH.search(text), name
            assert set(re.findall(rb'"host(?:_name)?": *"([^"]*)"', text)) <= {b"node-a"}, name
