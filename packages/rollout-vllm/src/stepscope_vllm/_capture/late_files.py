"""Files of ended captures that were written after the process that opened the capture had ended."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stepscope.engines import EngineCapture
from stepscope.errors import StepscopeError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.manifest.records import ProcessPart
from stepscope.files.storage.processes import is_running
from stepscope_vllm._capture.collection import adopt
from stepscope_vllm._capture.recording import Recording
from stepscope_vllm._driving.target import Target
from stepscope_vllm._files import engine_folder, names, traces

log = logging.getLogger("stepscope")


def bring_home(target: Target, capture: EngineCapture, folder: Path) -> None:
    """Move files of ended captures to their steps' folders, with sidecars.

    Args:
        capture: A capture of the same engine, in the same run.
        folder: The folder that the engine writes to.
    """
    for late, files in _late(capture, folder):
        try:
            adopt(Recording(target=target, capture=late, ignored={}), files, folder)
        except (OSError, StepscopeError) as error:
            log.warning("stepscope: could not publish late files of step %d: %s", late.step, error)


def _late(capture: EngineCapture, folder: Path) -> Iterator[tuple[EngineCapture, set[str]]]:
    """Yield each ended capture with its complete files."""
    run = RunLayout(Path(capture.step_dir).parent)
    other = re.search(r"_replica\d+$", capture.name)  # tells it from those of other servers
    present = {name for name in engine_folder.listed(folder) if not names.is_recording(name)}
    steps = {name: step for name in present if (step := names.step_of(name)) is not None}
    for step in sorted(set(steps.values())):
        layout = run.step(step)
        for run_id in runs_that_are_over(read_parts(layout)[0]):
            late = msgspec.structs.replace(
                capture,
                step=step,
                run_id=run_id,
                name=f"step_{step:06d}_{run_id}{other[0] if other else ''}",
                out_dir=str(layout.engine_dir(capture.replica)),
                step_dir=str(layout.root),
                ranks=None,
            )
            prefix = f"{names.prefix_of(late.name)}_"
            files = {name for name in steps if name.startswith(prefix) and _is_complete(folder / name)}
            if files:
                yield late, files


def _is_complete(path: Path) -> bool:
    return not (names.is_trace(path.name) and traces.unfinished(path))


def runs_that_are_over(parts: Sequence[ProcessPart]) -> set[str]:
    """Return the runs whose only capture of the step has ended.

    If several processes opened a capture, each has a replica 0. A file's name does not tell them apart, so
    such files are not moved.
    """
    owners: dict[str, list[ProcessPart]] = {}
    for part in parts:
        if part.owner:
            owners.setdefault(part.run_id, []).append(part)
    return {
        run_id
        for run_id, own in owners.items()
        if len({part.process.key for part in own}) == 1 and all(map(_has_ended, own))
    }


def _has_ended(part: ProcessPart) -> bool:
    here = part.process.host == socket.gethostname()
    return part.closed is not None or (here and not is_running(part.process.pid))
