"""Outcomes of one capture's replicas in the manifest, both in time and late."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec

from stepscope._recording.after import pipeline
from stepscope._recording.output.manifest_part import ManifestPart
from stepscope._recording.process.failures import describe
from stepscope.engines.fetch import LEFT_BEHIND
from stepscope.errors import ours
from stepscope.files.layout import StepLayout, sidecar_of
from stepscope.files.manifest.records import (
    AWAITED,
    IDLE,
    LATE,
    Expectation,
    Pending,
    State,
    cut_short,
    of_engine,
)
from stepscope.files.sidecar import Artifact


class EngineOutcomes:
    """Outcomes of replicas, as expectations `replica N` in the owner's part of the manifest."""

    def __init__(self, layout: StepLayout, manifest_part: ManifestPart) -> None:
        self._layout = layout
        self._manifest_part = manifest_part
        self._elsewhere: set[str] = set()
        """Labels of engines that announced files which are not on this host and may still be fetched."""

    def look_again(self) -> None:
        """Record the files that were not here at the stop and have been fetched since."""
        for item in self._manifest_part.record.expected:
            if item.name in self._elsewhere:
                reason = self._not_here(item.artifacts) or cut_short(item.artifacts)
                state: State = "partial" if reason else "ok"
                kept = {
                    option: why
                    for option, why in item.ignored.items()
                    if reason or not option.startswith(LEFT_BEHIND)
                }
                self._manifest_part.expect(
                    msgspec.structs.replace(item, state=state, reason=reason, ignored=kept)
                )

    def await_late_files(self, label: str, reason: str) -> None:
        """Record that a stop failed or took too long, and that its files may still come."""
        reason = f"{reason}; {AWAITED['late']}"
        self._manifest_part.expect(
            Expectation(name=label, kind="engine", state="pending", pending="late", reason=reason)
        )

    def enter(self, label: str, artifacts: Sequence[Artifact], ignored: dict[str, str]) -> None:
        self._manifest_part.expect(self._outcome(label, tuple(artifacts), ignored))
        for artifact in artifacts:
            path = self._layout.root / artifact.path
            # Its sidecar may lie on another host's own disk.
            if sidecar_of(path).exists():
                pipeline.artifact_done(path, None, self._manifest_part)

    def enter_late_stop(self, label: str, stopped: asyncio.Future[list[Artifact]]) -> None:
        """Record the outcome of a stop that ended after its deadline, and write this part and the
        manifest.
        """
        try:
            artifacts = stopped.result()
        except ours() as error:
            self._manifest_part.fail(label, f"stop, after its deadline: {describe(error)}", kind="engine")
        else:
            # Not the profiler's `ignored`: that may be of a later capture.
            ignored = {k: v for artifact in artifacts for k, v in artifact.ignored.items() if k != LATE}
            self.enter(label, artifacts, ignored)
        self._manifest_part.write()
        self._manifest_part.fold(self._layout)

    def _outcome(self, label: str, artifacts: tuple[Artifact, ...], ignored: dict[str, str]) -> Expectation:
        if not artifacts and IDLE in ignored:
            idle = ignored.pop(IDLE)
            return Expectation(
                name=label, kind="engine", state="ok", idle=True, notes=(idle,), ignored=ignored
            )
        if not artifacts:
            state: State = "skipped" if "artifacts" in ignored else "missing"
            reason = ignored.get("artifacts", "the engine stopped and left no file")
            return Expectation(name=label, kind="engine", state=state, reason=reason, ignored=ignored)
        pending: Pending | None = None
        trouble = self._not_here(artifacts)
        if trouble is not None:
            self._elsewhere.add(label)
        elif LATE in ignored:
            trouble, pending = f"{ignored[LATE]}; {AWAITED['late']}", "late"
        return of_engine(label, artifacts, ignored, trouble, pending)

    def _not_here(self, artifacts: Sequence[Artifact]) -> str | None:
        """Return a reason that names the absent files and the place to look (a host's own disk may have the
        same path), or None if all files are here.
        """
        absent = [artifact for artifact in artifacts if not (self._layout.root / artifact.path).exists()]
        if not absent:
            return None
        hosts = {artifact.host for artifact in absent} - {socket.gethostname()}
        others = ", ".join(sorted(filter(None, hosts)))
        hint = f". They are on {others}, below {self._layout.root} there" if others else ""
        return f"announced and not on disk: {', '.join(artifact.path for artifact in absent)}{hint}"
