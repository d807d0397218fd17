"""`stepscope mirror`: updates the copy of a run in a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import STEPS_HELP, find_steps, is_step, read_run
from stepscope.config import FinishConfig
from stepscope.files.layout import RunLayout
from stepscope.mirror.copy import StepCopy, open_store
from stepscope.mirror.program import copy_run
from stepscope.report.formatting import size


def mirror(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="Where to; else the run's own finish.mirror.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
) -> None:
    """Copy a run to its mirror. Files that are there already are not sent again. Nothing is removed."""
    os.umask(0o077)  # a copy in a folder is as private as its original
    first = find_steps(path, step)
    run = RunLayout(first[0].root.parent if is_step(path) else path)
    url = _url(run, to)
    store = open_store(url)
    with screen.waiting(f"copying to {url}"):
        failed = copy_run(store, run, first, earlier=False, on_step=_show)
    for name, reason in failed.items():
        screen.warn(f"{name}: {reason}")
    raise typer.Exit(Exit.INCOMPLETE if failed else Exit.OK)


def _url(run: RunLayout, to: str | None) -> str:
    if to is not None:
        return FinishConfig(mirror=to).mirror or to
    for file in reversed(run.runs()):
        record = read_run(file)
        finish = {} if record is None else record.config.get("finish")
        url = finish.get("mirror") if isinstance(finish, dict) else None
        if isinstance(url, str):
            return url
    raise CommandError(f"no run in {run.root} has a finish.mirror; name the store: --to s3://bucket/prefix")


def _show(copy: StepCopy) -> None:
    name = copy.step.root.name
    sent = f"{copy.sent} sent ({size(copy.sent_bytes)})" if copy.sent else "none sent"
    screen.say(f"{name}: {copy.files} files, {sent}, {len(copy.failed)} failed")
    for file, reason in list(copy.failed.items())[:10]:
        screen.warn(f"{name}/{file}: {reason}")
