"""Tests on recordings of real Ascend 910B devices, compared with Ascend's own analysis in their folders.

The recordings come from the repository Ascend/msinsight and are not part of this project. The tests are
skipped if `shared/data/ascend` does not exist beside the checkout.
"""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pytest

from packages.report.tests.commands import Command
from stepscope_report.accounting import union_ns
from stepscope_report.timeline.activity.event_names import work_of
from stepscope_report.timeline.plain import read_plain
from stepscope_report.timeline.readers import FoundFile, Notes, Slice
from stepscope_report.timeline.readers.contract import Readers
from tests.tree import ROOT

DATA = ROOT.parent / "shared" / "data" / "ascend"
RECORDINGS = [
    DATA / kind / f"rank{rank}_ascend_pt" for kind in ("db_level0", "text_level0") for rank in (0, 1)
]

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no recordings of an Ascend 910B in {DATA}")


def answers(folder: Path) -> Mapping[str, float]:
    """Return {name: us} from Ascend's own analysis. Names are the columns of its table StepTraceTime."""
    output = folder / "ASCEND_PROFILER_OUTPUT"
    if (output / "analysis.db").exists():
        with closing(
            sqlite3.connect(f"file:{output / 'analysis.db'}?mode=ro&immutable=1", uri=True)
        ) as database:
            cursor = database.execute("SELECT * FROM StepTraceTime")
            names = [column[0] for column in cursor.description]
            return dict(zip(names, cursor.fetchone(), strict=True))
    with open(output / "step_trace_time.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    short = {
        name.lower().replace("(not overlapped)", "_not_overlapped"): value for name, value in row.items()
    }
    return {name: float(value) for name, value in short.items() if value}


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_computing_and_communication_are_those_of_ascends_analysis(folder: Path) -> None:
    said = answers(folder)
    contents = [content.content for group in read_plain([folder]).contents for content in group]
    (device,) = [device for content in contents for device in content.devices]
    assert device.compute_us == pytest.approx(said["computing"], rel=0.01)
    assert device.communication_us == pytest.approx(said["communication"], rel=0.01)
    assert device.exposed_us == pytest.approx(said["communication_not_overlapped"], rel=0.01)
    assert device.communication_us - device.exposed_us == pytest.approx(said["overlapped"], rel=0.01)


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_free_time_between_the_first_and_the_last_work_is_that_of_ascends_analysis(folder: Path) -> None:
    """Ascend counts from the first to the last computation or collective; copies are no work there."""
    work = sorted((event.start_ns, event.start_ns + event.dur_ns) for event in _work(folder))
    span_ns = max(end for _, end in work) - work[0][0]
    assert (span_ns - union_ns(work)) / 1000 == pytest.approx(answers(folder)["free"], rel=0.01)


@pytest.mark.parametrize("folder", RECORDINGS[:2], ids=lambda folder: folder.name)
def test_gaps_that_were_queued_or_waited_for_are_those_of_the_database(
    folder: Path, command: Command
) -> None:
    """The test's own queries find the gaps, and the launches or synchronisations that end them."""
    output = folder / "ASCEND_PROFILER_OUTPUT"
    (file,) = output.glob("ascend_pytorch_profiler_*.db")
    with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as database:
        launches = dict(
            database.execute("SELECT connectionId, MIN(CAST(startNs AS INT)) FROM CANN_API GROUP BY 1")
        )
        waits = database.execute(
            "SELECT CAST(startNs AS INT), CAST(endNs AS INT) FROM CANN_API JOIN STRING_IDS s ON s.id = name"
            " WHERE s.value LIKE 'aclrtSynchronize%'"
        ).fetchall()
        work = database.execute(
            "SELECT CAST(t.startNs AS INT), CAST(t.endNs AS INT), t.connectionId FROM TASK t"
            " JOIN STRING_IDS s ON s.id = t.taskType WHERE s.value LIKE '%MEMCPY%' OR s.value LIKE 'SDMA%'"
            " OR t.globalTaskId IN (SELECT globalTaskId FROM COMPUTE_TASK_INFO)"
            " UNION ALL SELECT CAST(startNs AS INT), CAST(endNs AS INT), connectionId FROM COMMUNICATION_OP"
        ).fetchall()
    queued = waited = until = 0
    for start, end, connection in sorted(work):
        launch = launches[connection]
        if until and start > until:
            if launch <= until:
                queued += start - until
            elif any(begun <= until and until - 1000 <= ended <= launch + 1000 for begun, ended in waits):
                waited += start - until
        until = max(until, end)
    rows = command("report", folder, "--json").json["gaps"]
    found = {kind: sum(row["total_ns"] for row in rows if row["kind"] == kind) for kind in _KINDS}
    assert found == {"queued": pytest.approx(queued), "synchronisation": pytest.approx(waited), "unknown": 0}
    assert queued > 0 < waited


_KINDS = ("queued", "synchronisation", "unknown")


def _work(folder: Path) -> Iterator[Slice]:
    readers = Readers()
    for path in sorted((folder / "ASCEND_PROFILER_OUTPUT").iterdir()):
        file = FoundFile(path=path, name=path.name)
        reader, claim = readers.claim(file)
        if reader is None or claim is None or not claim.read:
            continue
        with closing(reader.open(file, Notes())) as recording:
            for event in recording.events():
                if not isinstance(event, Slice) or event.category not in ("kernel", "communication"):
                    continue
                if work_of(event.category, event.name) != "memory":
                    yield event


def test_times_since_the_start_of_each_recording_make_no_straggler(tmp_path: Path, command: Command) -> None:
    """Newer torch_npu writes times since each rank's start. Compared as they are, they name a wrong rank."""
    for rank in (0, 1):
        shutil.copytree(DATA / "text_level0" / f"rank{rank}_ascend_pt", tmp_path / f"rank{rank}_ascend_pt")
    absolute = command("report", tmp_path, "--json").json["traces"]
    assert absolute["stragglers"]
    for file in tmp_path.rglob("trace_view.json"):
        events = json.loads(file.read_text())
        first = min(Decimal(event["ts"]) for event in events if event.get("ts"))
        for event in events:
            if event.get("ts"):
                event["ts"] = float(Decimal(event["ts"]) - first)
        file.write_text(json.dumps(events))
    relative = command("report", tmp_path, "--json", code=3).json["traces"]
    assert [bool(row["unaligned"]) for row in relative["traces"]] == [True, True]
    assert not relative["stragglers"]
    busy = [[row["busy_ns"] for row in tables["devices"]] for tables in (absolute, relative)]
    assert busy[1] == pytest.approx(busy[0], rel=1e-6)
