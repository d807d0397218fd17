"""Inspection of recordings on disk, and their move to the step's folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from stepscope_npu import _disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a complete recording, not moved yet, with operators, device data and `profiler_info_0.json`."""
    folder = tmp_path / "made" / "in" / "host_1_2_ascend_pt"
    (folder / "FRAMEWORK").mkdir(parents=True)
    (folder / "FRAMEWORK" / "torch.op_range").write_text("operators")
    (folder / "PROF_000001_1_X").mkdir()
    (folder / "profiler_info_0.json").write_text('{"cann_version": "8.3.RC1"}')
    return folder


def test_a_whole_recording_lacks_nothing(folder: Path) -> None:
    assert _disk.look(folder.parent, records_device=True) == (folder, None, None)


def test_without_device_data_it_is_whole_where_none_was_asked_for(folder: Path) -> None:
    (folder / "PROF_000001_1_X").rmdir()
    assert _disk.look(folder.parent, records_device=False) == (folder, None, None)
    assert "no device data" in str(_disk.look(folder.parent, records_device=True).lacking)


def test_what_the_calls_raised_is_said_of_a_recording_that_looks_whole(folder: Path) -> None:
    recording = _disk.look(folder.parent, records_device=True, errors=["stop: 100000", "finalize: 7"])
    assert "stop: 100000; finalize: 7." in str(recording.lacking)


def test_without_its_information_it_is_none(folder: Path) -> None:
    (folder / "profiler_info_0.json").unlink()
    assert "profiler_info.json" in str(_disk.look(folder.parent, records_device=True).failed)


def test_empty_files_are_no_data(folder: Path) -> None:
    (folder / "PROF_000001_1_X").rmdir()
    (folder / "FRAMEWORK" / "torch.op_range").write_text("")
    assert "it is empty" in str(_disk.look(folder.parent, records_device=False).failed)


def test_where_torch_npu_has_made_no_folder_that_is_said(tmp_path: Path) -> None:
    message = "torch_npu made no folder. Its messages are on stdout"
    assert _disk.look(tmp_path, records_device=True) == (None, None, message)


@pytest.mark.parametrize(
    ("content", "known"),
    [('{"cann_version": "8.3.RC1"}', "8.3.RC1"), ('{"cann_version": "not known"}', None), ("{}", None)],
)
def test_the_version_of_cann_is_what_the_recording_says_if_it_says_one(
    folder: Path, content: str, known: str | None
) -> None:
    (folder / "profiler_info.json").write_text("{")  # a damaged file beside the good one
    (folder / "profiler_info_0.json").write_text(content)
    assert _disk.cann_version(folder) == known


@pytest.mark.parametrize("across", [False, True])
def test_a_recording_is_moved_within_and_across_file_systems_and_leaves_no_folder_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across: bool
) -> None:
    if across:

        def refuse(*_: object) -> None:
            raise OSError("Invalid cross-device link")

        monkeypatch.setattr(os, "rename", refuse)
    _disk.place(folder, tmp_path / "placed")
    assert (tmp_path / "placed" / "FRAMEWORK" / "torch.op_range").read_text() == "operators"
    assert list(tmp_path.iterdir()) == [tmp_path / "placed"]


def test_a_folder_is_made_again_where_the_one_above_it_has_just_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above, make = tmp_path / "step" / "recordings", tempfile.mkdtemp

    def removed_at_first(suffix: None = None, prefix: None = None, dir: Path | None = None) -> str:  # noqa: A002
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        above.rmdir()
        return make(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_first)
    assert _disk.make_folder(above).parent == above
