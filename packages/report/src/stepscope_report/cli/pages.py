"""Writes reports as pages: `report.html` in each step's folder, and one for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.sidecar import Artifact
from stepscope.files.storage.atomic import write_atomic
from stepscope.files.storage.reading import size_below
from stepscope_report import StepReport
from stepscope_report.html.run_page import RunStep, render_run
from stepscope_report.html.step_page import render_step
from stepscope_report.section import StepFile
from stepscope_report.timeline import Timeline

LINKED = 200
"""Largest number of artifacts that a page links to. Beyond it, the page links to their folder."""


class Pages:
    """The pages of one command. A folder that cannot be written to costs its page, and nothing else."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        self.failed: list[str] = []
        """Pages that could not be written, each with the reason."""

    def add_step(self, layout: StepLayout, timeline: Timeline, report: StepReport) -> None:
        self._write(layout.report, render_step(timeline, report, files_of(layout, timeline)))

    def add_run(
        self,
        layout: RunLayout,
        reports: Sequence[StepReport],
        unreadable: Mapping[str, str],
        others: Mapping[str, Sequence[int]] = {},
    ) -> None:
        """Write the page of a run, after those of its steps.

        Args:
            others: {id of another run in the folder: its steps that are left out}.
        """
        steps = [RunStep(report=report, href=self._href(layout, report.step)) for report in reports]
        lines = [f"{step}: {why}" for step, why in unreadable.items()]
        self._write(layout.report, render_run(steps, lines, others))

    def _href(self, layout: RunLayout, step: int) -> str | None:
        page = layout.step(step).report
        return page.relative_to(layout.root).as_posix() if page in self.written else None

    def _write(self, path: Path, page: str) -> None:
        try:
            write_atomic(path, page.encode())
        except OSError as error:
            self.failed.append(f"{path} was not written: {error}")
        else:
            self.written.append(path)


def files_of(layout: StepLayout, timeline: Timeline) -> list[StepFile]:
    """Return the contents of a step's folder: timeline, manifest, folders, and artifacts."""
    whole = ((layout.timeline, "merged timeline, opens in ui.perfetto.dev"), (layout.manifest, "manifest"))
    folders = (
        (layout.spans, "spans, a file for each process"),
        (layout.processes, "parts of the manifest, one for each process"),
        (layout.traces, "traces"),
    )
    files = [_file(layout, path, what) for path, what in whole if path.is_file()]
    files += [_folder(layout, path, what) for path, what in folders if path.is_dir()]
    return [*files, *list(_artifacts(layout, timeline))[:LINKED]]


def _artifacts(layout: StepLayout, timeline: Timeline) -> Iterator[StepFile]:
    parts = () if timeline.manifest is None else timeline.manifest.processes
    for part in parts:
        for item in part.expected:
            for artifact in item.artifacts:
                path = layout.root / artifact.path
                if path.is_file() and path.resolve().is_relative_to(layout.root.resolve()):
                    yield _file(layout, path, _what(artifact))


def _what(artifact: Artifact) -> str:
    rank = "" if artifact.rank is None else f" {artifact.rank}"
    stage = "" if artifact.stage is None else f", {artifact.stage}"
    return f"{artifact.kind.replace('_', ' ')} of {artifact.role}{rank}{stage}"


def _file(layout: StepLayout, path: Path, what: str) -> StepFile:
    return StepFile(path=path.relative_to(layout.root).as_posix(), what=what, bytes=path.stat().st_size)


def _folder(layout: StepLayout, path: Path, what: str) -> StepFile:
    size_bytes = size_below(path)
    return StepFile(path=path.relative_to(layout.root).as_posix() + "/", what=what, bytes=size_bytes)
