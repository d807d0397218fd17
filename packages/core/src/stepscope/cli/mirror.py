"""`stepscope mirror`: brings a run's copy in a store up to date."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from socket import gethostname
from typing import Annotated

import typer

from stepscope.cli import screen
from stepscope.cli.exits import CommandError, Exit
from stepscope.cli.find import find_steps, is_step, read_run
from stepscope.config import FinishConfig
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.mirror import uncopied
from stepscope.files.storage.processes import is_running
from stepscope.mirror.copy import StepCopy, copy_run_records, copy_step
from stepscope.mirror.store import open_store
from stepscope.report.formatting import size


def mirror(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="Where to; else the run's own finish.mirror.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only this step of a run.")] = None,
    and_earlier: Annotated[
        bool, typer.Option("--and-earlier", help="With --step: then other steps that are not whole there.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what failed.")] = False,
) -> None:
    """Copy a run to its mirror, and compare: what is there already is not sent again. Nothing is removed."""
    os.umask(0o077)  # a copy in a folder is as private as its original
    first = find_steps(path, step)
    run = RunLayout(first[0].root.parent if is_step(path) else path)
    url = _url(run, to)
    store = open_store(url)
    failed = 0
    with screen.waiting(f"copying to {url}"):
        for layout in first:
            failed += _say(copy_step(store, url, layout), quiet=quiet)
        for layout in _others(run, first, url) if and_earlier and not failed else ():
            _say(copy_step(store, url, layout), quiet=quiet)
        for name, why in copy_run_records(store, run).items():
            screen.say(f"{name}: {why}")
            failed += 1
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


def _others(run: RunLayout, done: Iterable[StepLayout], url: str) -> Iterable[StepLayout]:
    """Steps that are not whole in the mirror, as a killed run leaves them, and that nobody records now."""
    known = {layout.root for layout in done}
    for layout in run.steps().values():
        if layout.root not in known and not _is_open(layout) and uncopied(layout, gethostname(), url):
            yield layout


def _is_open(step: StepLayout) -> bool:
    return any(
        part.closed is None and (part.process.host != gethostname() or is_running(part.process.pid))
        for part in read_parts(step)[0]
        if part.owner
    )


def _say(copy: StepCopy, *, quiet: bool) -> bool:
    """Whether anything failed."""
    name = copy.step.root.name
    if not quiet:
        sent = f"{copy.sent} sent ({size(copy.sent_bytes)})" if copy.sent else "none sent"
        screen.say(f"{name}: {copy.files} files, {sent}, {len(copy.failed)} failed")
    for file, why in list(copy.failed.items())[:10]:
        screen.say(f"{name}/{file}: {why}")
    return bool(copy.failed)
