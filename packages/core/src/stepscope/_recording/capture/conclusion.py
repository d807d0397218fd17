"""End of a capture: everything that is derived from its manifest. The exporter folds that again later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stepscope._recording.after import outcome, pipeline, retention
from stepscope._recording.capture import omissions, on_demand
from stepscope._recording.capture.asked import Asked
from stepscope._recording.capture.files import CapturedFiles
from stepscope._recording.process import failures, identity
from stepscope._recording.recorder import baseline, standing
from stepscope._recording.session.session import Session
from stepscope.files.manifest.records import Manifest, ProcessPart
from stepscope.files.storage.atomic import create_once

if TYPE_CHECKING:
    from stepscope._recording.fanout.participants import Participants

_is_torch_explained = False
"""True if this process has explained the lines that torch prints. One writer: `_about_torch`."""


def conclude(asked: Asked, session: Session, participants: Participants | None) -> Manifest:
    """Write the manifest, log problems, and remove steps for which the budget has no room."""
    manifest = _write(session, partial(_enter_omissions, asked, session, participants))
    if asked.on_request:
        is_apart = participants is not None and bool(participants.apart)
        no_profiler = None if is_apart else omissions.no_profiler(session.config, manifest.processes)
        tell_asker(asked, outcome.shortfall(manifest, no_profiler))
    retention.clean_up(session)
    baseline.captured(session)
    recorder, part = standing.standing(), session.manifest_part.record
    if recorder is not None and part.closed is not None:
        recorder.captured(session.step, part.opened, part.closed, part.error, session.log.top_ns)
    return manifest


def discard(asked: Asked, session: Session, reason: str) -> None:
    """Write the manifest of a capture whose recordings are unwanted."""
    pipeline.withdraw(session, reason)
    _write(session, lambda _: None)
    tell_asker(asked, reason)
    retention.clean_up(session)


def _write(session: Session, enter: Callable[[Sequence[ProcessPart]], None]) -> Manifest:
    # Before the fold: a trace that fails during it is told at least once, perhaps twice.
    session.manifest_part.told = True
    manifest = session.manifest_part.write_last(session.layout, enter)
    for line in outcome.problems_to_tell(manifest, session.process):
        failures.warn("stepscope: step %d: %s", session.step, line)
    return manifest


def tell_asker(asked: Asked, reason: str | None) -> None:
    """Answer the request for the step with the reason why its capture is incomplete, or None if it is
    complete.
    """
    if asked.on_request:
        on_demand.tell_outcome(asked.step, reason)


def tell_summary(session: Session, files: CapturedFiles, manifest: Manifest) -> None:
    """Log one line about a captured step. If each rank captures by itself, the last one to close logs it."""
    if outcome.is_open_elsewhere(manifest.processes, session.process):
        return
    has_peers = any(outcome.is_peer(part, session.process) for part in manifest.processes)
    if has_peers and not create_once(session.layout.logged(session.run_id, session.number)):
        return  # two ranks that close at the same moment both are the last
    line = outcome.summary(manifest, session.layout.root, session.config.save_path, files.apart)
    failures.tell("stepscope: %s%s", line, _about_torch())


def _enter_omissions(
    asked: Asked, session: Session, participants: Participants | None, parts: Sequence[ProcessPart]
) -> None:
    """Add the expected participants that took no part to the manifest."""
    manifest_part = session.manifest_part
    omissions.tell_missed(parts)
    if manifest_part.record.absent or manifest_part.state(omissions.WORKERS) is not None:
        return  # who is not there may have the role
    if _knows_all(session, participants, parts):
        omissions.enter_unmatched(manifest_part, session.config, parts, engines=asked.engines is not None)


def _knows_all(session: Session, participants: Participants | None, parts: Sequence[ProcessPart]) -> bool:
    """Return whether the parts of all participants are here.

    If a launcher's ranks capture by themselves, only the last one to close has all parts.
    """
    if participants is not None:
        return not participants.apart
    _, size = identity.place()
    if size == 1:
        return True
    ranks = {part.process.key for part in parts if part.owner}
    return len(ranks) == size and not outcome.is_open_elsewhere(parts, session.process)


def _about_torch() -> str:
    """Return an explanation of the lines that torch's profiler printed at its start; empty after the first
    time.
    """
    global _is_torch_explained
    torch_window = sys.modules.get("stepscope.backends.torch.window")
    if _is_torch_explained or torch_window is None or not torch_window.kineto_has_started:
        return ""
    _is_torch_explained = True
    return ". The lines that torch's profiler prints at its first start are harmless"
