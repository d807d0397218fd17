"""TensorBoard: a step's figures as scalars, in event files below the run's folder. Needs no torch."""

from __future__ import annotations

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stepscope_report.writers.publish import ReportedStep


def on_report(step: ReportedStep) -> None:
    """Add the scalars to `<save_path>/tensorboard/<run>`."""
    report = step.report
    folder = step.run.tensorboard(report.run_id)
    writer = EventFileWriter(str(folder))
    try:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in step.scalars.items()]
        # The time of the capture, not of writing, so that curves over time show the run.
        event = Event(wall_time=report.opened_ns / 1e9, step=report.step, summary=Summary(value=values))
        writer.add_event(event)
    finally:
        writer.close()
