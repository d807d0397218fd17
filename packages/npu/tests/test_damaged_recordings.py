"""Whatever an analysed recording of an NPU holds, a merge ends, and says what it could not use."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.npu.tests.real.cann.fake_msprof import write_database, write_json
from packages.report.tests.damage import damage
from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, StepFolder
from stepscope_report.timeline import merge_step

MS = 1_000_000
MARKED = [(OPENED_NS + MS, OPENED_NS + 2 * MS, 1, "default", "actor.work")]
FOLDERS = 40 if settings().max_examples == 100 else settings().max_examples
"""The number of damaged folders to try: few, unless a profile asks for another number."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a step with one recording of each form."""
    folder = StepFolder(tmp_path_factory.mktemp("whole"))
    process = folder.process("actor", 0, owner=True)
    process.span("work", MS, 20 * MS)
    process.close(30 * MS)
    step = folder.write()
    for name in ("view_ascend_pt", "database_ascend_pt"):
        output = step / "traces" / "actor" / name / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        ended = {"end_info": {"collectionTimeEnd": OPENED_NS, "MonotonicTimeEnd": 5}}
        (output.parent / "profiler_info_0.json").write_text(json.dumps(ended))
        if name.startswith("view"):
            write_json(output / "trace_view.json", 4711, "python", MARKED)
        else:
            write_database(output / "ascend_pytorch_profiler_0.db", 4711, MARKED)
        info = process.info
        artifact = Artifact(
            path=f"traces/actor/{name}", kind="npu_recording", tool="npu", role=info.role, rank=0,
            host=info.host, pid=info.pid, size_bytes=1,
        )  # fmt: skip
        sidecar = Sidecar(
            step=2, run_id="run1", artifact=artifact, process=info.key, opened=process.anchor(0), closed=None
        )
        sidecar_of(output.parent).write_bytes(msgspec.json.encode(sidecar))
    return step


def test_a_whole_step_is_merged(whole: Path, tmp_path: Path) -> None:
    merged = merge_step(shutil.copytree(whole, tmp_path / "step_000002"))
    assert merged.problems == ()


@pytest.mark.slow
@given(random=st.randoms(use_true_random=False))
@settings(max_examples=FOLDERS)
def test_a_damaged_recording_ends_no_merge(whole: Path, random: Random) -> None:
    with tempfile.TemporaryDirectory() as above:
        step = Path(shutil.copytree(whole, Path(above, "step_000002")))
        files = sorted(path for path in (step / "traces").rglob("*") if path.is_file())
        for path in random.sample(files, random.choice((1, 1, 2))):
            damage(path, random, Path(above, "secret.json"))
        merge_step(step)
