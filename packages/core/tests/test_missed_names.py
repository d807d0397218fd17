"""Names that a preset lists and some process lacks: who logs them."""

from __future__ import annotations

import pytest

from stepscope._recording.capture.omissions import tell_missed
from stepscope._recording.instrument import patch
from stepscope._recording.process import failures
from stepscope.files.clock import ClockAnchor
from stepscope.files.manifest import ProcessPart
from stepscope.files.sidecar import ProcessInfo

ANCHOR = ClockAnchor(wall_ns=1, mono_ns=1, raw_ns=1, uncertainty_ns=0)
PLACE = "instrument('trl.trainer', 'Trainer.step') of the preset 'trl'"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "missed", {})
    monkeypatch.setattr(failures, "_warned", set())
    monkeypatch.delenv("RANK", raising=False)


def a_part(pid: int, owner: bool = False) -> ProcessPart:
    process = ProcessInfo(role="actor", rank=None, world_size=None, host="host-a", pid=pid)
    return ProcessPart(
        run_id="run",
        step=1,
        process=process,
        owner=owner,
        opened=ANCHOR,
        recorded=False,
        why="off",
        missed={PLACE: "ConfigError: no such name"},
    )


def test_a_ray_worker_that_opens_the_capture_logs_its_own_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["/x/default_worker.py"])
    monkeypatch.setitem(patch.missed, PLACE, "ConfigError: no such name")
    tell_missed([a_part(1, owner=True)])
    assert len(caplog.messages) == 1
