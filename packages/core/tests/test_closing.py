"""Closing of a capture: what it reads of the other processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture
from stepscope.engines import EngineProfiler
from stepscope.files.manifest import parts
from stepscope.files.manifest.records import Manifest, ProcessPart
from stepscope.recording.output import manifest_part
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "with an engine"])
def test_closing_folds_the_manifest_once(
    has_engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds: list[int] = []

    def fold(read: Sequence[ProcessPart]) -> Manifest:
        folds.append(len(read))
        return parts.fold(read)

    config = ProfileConfig(save_path=str(tmp_path), steps=[1], roles={"none": {}})
    engines: list[EngineProfiler] | None = [FakeEngineProfiler(FakeEngine())] if has_engine else None
    cap = capture(1, config=config, engines=engines).open()
    monkeypatch.setattr(manifest_part, "fold", fold)
    cap.close()
    assert folds == [1]
