"""The contract of writers, and the program that passes a step's figures to writers after its capture."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

import msgspec

from stepscope.config import WRITERS, closest
from stepscope.errors import ConfigError, StepscopeError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.scalars import StepScalars, write_scalars
from stepscope_report import StepReport, step_report, to_scalars
from stepscope_report.html.step_page import render_step
from stepscope_report.near import Neighbours
from stepscope_report.timeline import Timeline, load_step

GROUP = "stepscope.writers"
_OWN = {
    "tensorboard": "trackers:to_tensorboard",
    "wandb": "trackers:to_wandb",
    "mlflow": "trackers:to_mlflow",
    "otel": "otel:on_report",
}
"""{writer of this package: `module:function`}."""


class ReportedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in the form that a writer gets."""

    run: RunLayout
    """Layout of the run's folder."""
    report: StepReport
    timeline: Timeline
    scalars: dict[str, float]
    """Numbers by name, as from `stepscope_report.to_scalars`."""

    @property
    def page(self) -> str:
        """Return the HTML page of the step, made without reading its traces."""
        return render_step(self.timeline, self.report)


class ReportWriter(Protocol):
    """A function that gives a step to a store. It runs in a process of its own beside the training, and is
    found through the entry points `stepscope.writers`.

    An error that it raises is recorded in the manifest as the reason why the store lacks the step.
    """

    def __call__(self, step: ReportedStep, /) -> None: ...


def main(save_path: str, step: str, run_id: str, writers: str) -> int:
    """Publish one step of a run and return the exit code.

    Args:
        writers: Names of writers, with commas between them.
    """
    os.umask(0o077)  # files of writers are as private as all files in the run's folder
    run = RunLayout(Path(save_path))
    try:
        figures = publish_step(run, run.step(int(step)), run_id, load_writers(writers.split(",")))
    except StepscopeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for line in outcomes(figures):
        sys.stderr.write(f"{line}\n")
    return 3 if any(figures.written.values()) else 0


def load_writers(names: Iterable[str]) -> dict[str, ReportWriter]:
    """Return the writers with these names.

    Raises:
        ConfigError: a name belongs to no writer, or a package that a writer needs is missing.
    """
    return {name.strip(): _load_writer(name.strip()) for name in names if name.strip()}


def _load_writer(name: str) -> ReportWriter:
    """Return the writer with this name: a writer of this package, or a writer that another package offers by
    an entry point.
    """
    try:
        if name in WRITERS:
            import_module(WRITERS[name])
            module, _, function = _OWN[name].partition(":")
            return cast(ReportWriter, getattr(import_module(f"{__name__}.{module}"), function))
        known = {point.name: point for point in entry_points(group=GROUP)}
        if name in known:
            return cast(ReportWriter, known[name].load())
    except ImportError as error:
        allowed = f"a writer whose package is installed ({error})"
        package = f"'stepscope[{name}]'" if name in WRITERS else "what it needs"
        raise ConfigError("finish.report_to", name, allowed, f"pip install {package}") from None
    names = sorted({*WRITERS, *known})
    near = closest(name, names)
    fix = f"did you mean {near!r}?" if near else "install the package that brings it"
    raise ConfigError("finish.report_to", name, f"a writer: {', '.join(names)}", fix)


def publish_step(
    run: RunLayout, step: StepLayout, run_id: str | None, writers: Mapping[str, ReportWriter]
) -> StepScalars:
    """Compute a step's figures, store them in the step's folder, and give them to `writers`.

    Raises:
        RecordError: The step cannot be read.
    """
    timeline = load_step(step.root, run_id=run_id)
    report = step_report(timeline, near=Neighbours().of(step.root, timeline))
    values = to_scalars(report)
    reported = ReportedStep(run=run, report=report, timeline=timeline, scalars=values)
    figures = StepScalars(
        run_id=report.run_id,
        step=report.step,
        opened_ns=report.opened_ns,
        values=values,
        written={name: _write(writer, reported) for name, writer in writers.items()},
    )
    write_scalars(step, figures)
    return figures


def outcomes(figures: StepScalars) -> list[str]:
    """Return a line for each writer, with the number of figures that it took, or its error."""
    return [
        f"{writer}: {failure or f'{len(figures.values)} figures'}"
        for writer, failure in figures.written.items()
    ]


def _write(writer: ReportWriter, reported: ReportedStep) -> str | None:
    try:
        writer(reported)
    except Exception as error:  # an unreachable store must not keep the figures from other stores
        return f"{type(error).__name__}: {error}"[:500]
    return None
