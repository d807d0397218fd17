"""Steps that are copied to a store, for the tests of the mirror."""

from __future__ import annotations

import os
from pathlib import Path
from socket import gethostname

from stepscope import ProfileConfig
from stepscope.files.layout import StepLayout
from stepscope.files.mirror import files_below
from stepscope.recording.after import pipeline
from stepscope.recording.output import exporter
from stepscope.testing.steps import StepFolder

HOST = gethostname()


def a_step(save_path: Path, step: int = 2, files: int = 3) -> StepLayout:
    """Return a captured step of another process, with files of 10 kB beside what all steps have."""
    folder = StepFolder(save_path, step=step)
    process = folder.process("trainer", 0, host=HOST, owner=True)
    process.span("update", 0, 10)
    process.close(20)
    folder.write()
    traces = folder.layout.traces / "actor"
    traces.mkdir(parents=True)
    for number in range(files):
        (traces / f"{number}.json").write_bytes(os.urandom(10_000))
    return folder.layout


def contents(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in files_below(root)}


def a_config(tmp_path: Path, url: str, **settings: object) -> ProfileConfig:
    return ProfileConfig.from_mapping(
        {
            "save_path": str(tmp_path / "run"),
            "steps": ["every:1"],
            "roles": {"*": {"profiler": "off"}},
            "finish": {"mirror": url},
        }
        | settings
    )


def drain() -> None:
    assert not exporter.exporter().drain(60)
    assert not pipeline._commands.drain(120)
