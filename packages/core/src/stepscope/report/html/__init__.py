"""Reports as pages: each is one file that opens offline and asks nobody for anything."""

from stepscope.report.html.run import RunStep, render_run
from stepscope.report.html.step import StepFile, render_step

__all__ = ["RunStep", "StepFile", "render_run", "render_step"]
