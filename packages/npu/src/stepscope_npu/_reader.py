"""Readers of analysed recordings of the Ascend profiler, for the merged timeline.

A recording is a folder that ends in `_ascend_pt`. A timeline needs its analysis: `ASCEND_PROFILER_OUTPUT`
with `trace_view.json`, or `ascend_pytorch_profiler[_RANK].db`, or both, which have the same content. `msprof`
without torch_npu writes `msprof_TIME.db`, which has the same tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from stepscope.files.storage import read_file
from stepscope_npu._analysis import analysed
from stepscope_npu._disk import SUFFIX
from stepscope_report.timeline.readers import Claim, FoundFile, Notes, Origin, Recording

_INFO = "profiler_info"
_RANK = re.compile(rf"{_INFO}_(\d+)\.json")
_DATABASES = "ascend_pytorch_profiler*.db"
_OF_MSPROF = re.compile(r"msprof_\d+\.db")
_PID = re.compile(rf"_(\d+)_\d{{17}}{SUFFIX}$")
"""The end of a recording's name, `host_PID_20250101120000123_ascend_pt`. The group is the pid."""


class TraceViewReader:
    """Reader of `trace_view.json`."""

    name = "npu trace_view"

    def claims(self, file: FoundFile) -> Claim | None:
        """Claim every file of a recording except databases; return None for other files. Only
        `trace_view.json` is read.
        """
        if file.path.name == "trace_view.json":
            return Claim()
        folder = recording_of(file.path)
        if folder is None or _is_database(file.path):
            return None
        if file.path.parent == folder and file.path.name.startswith(_INFO) and not analysed(folder):
            fix = (
                "run `stepscope analyse` on a step of stepscope, or torch_npu.profiler.profiler.analyse on "
                "the folder, where torch_npu and CANN are installed"
            )
            return Claim(read=False, why=f"a recording of an NPU that is not analysed: {fix}")
        return Claim(read=False)

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        from stepscope_npu._trace_view import TraceView

        return TraceView(file.path, notes, correction_ns(file), origin_of(file.path))


class DatabaseReader:
    """Reader of `ascend_pytorch_profiler*.db`, and of `msprof_*.db` outside of recordings."""

    name = "npu database"

    def claims(self, file: FoundFile) -> Claim | None:
        if not _is_database(file.path):
            return None
        folder = recording_of(file.path)
        if folder is None:
            return Claim(read=not file.path.with_name("trace_view.json").exists())
        if next(folder.rglob("trace_view.json"), None) is not None:
            return Claim(read=False)  # both have the same content
        # Two analyses of one recording leave two databases if only one analysis knew the rank.
        newest = max(folder.rglob(_DATABASES), key=lambda path: (path.stat().st_mtime_ns, path), default=None)
        return Claim(read=file.path == newest)

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        from stepscope_npu._database import Database

        return Database(file.path, notes, correction_ns(file), origin_of(file.path))


def recording_of(path: Path) -> Path | None:
    """Return the recording that a file is in, or None."""
    return next((folder for folder in path.parents if folder.name.endswith(SUFFIX)), None)


def origin_of(path: Path) -> Origin:
    """Return the process that made a recording: its rank from `profiler_info_RANK.json`, and its pid from the
    folder's name.
    """
    folder = recording_of(path)
    if folder is None:
        return Origin(clock="realtime")
    ranks = (_RANK.fullmatch(file.name) for file in sorted(folder.glob(f"{_INFO}_*.json")))
    rank = next((int(match[1]) for match in ranks if match is not None), None)
    pid = _PID.search(folder.name)
    return Origin(clock="realtime", pid=None if pid is None else int(pid[1]), rank=rank)


def _is_database(path: Path) -> bool:
    if _OF_MSPROF.fullmatch(path.name):
        return recording_of(path) is None  # an analysis renames the file in a recording
    return path.match(_DATABASES)


def correction_ns(file: FoundFile) -> int:
    """Return the ns to add to times of a recording without CANN data, so that they become unix times.

    torch_npu times host events by CLOCK_MONOTONIC_RAW. If CANN has left no reading of CLOCK_REALTIME and
    CLOCK_MONOTONIC_RAW, the analysis uses the difference of CLOCK_REALTIME and CLOCK_MONOTONIC instead.
    MONOTONIC has drifted away from RAW since boot (by 250 ms in one run). The sidecar contains all three
    clocks. The result is 0 if no correction is needed or known.
    """
    folder = recording_of(file.path)
    opened = None if file.sidecar is None else file.sidecar.opened
    if folder is None or opened is None or opened.raw_ns is None:
        return 0
    if any(folder.glob("PROF_*/host/start_info")) or any(folder.glob("PROF_*/device_*/start_info.*")):
        return 0
    ended = _end_info(folder)
    if ended is None:
        return 0
    return (opened.wall_ns - opened.raw_ns) - ended


def _end_info(folder: Path) -> int | None:
    """Return the difference of clocks in ns that the analysis used, or None if it is unknown."""
    for path in folder.glob(f"{_INFO}*.json"):
        try:
            info = json.loads(read_file(path))["end_info"]
            return int(info["collectionTimeEnd"]) - int(info["MonotonicTimeEnd"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return None
