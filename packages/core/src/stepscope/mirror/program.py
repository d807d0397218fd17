"""Copies of a run's steps and of the records beside them. Also the program that runs after a capture, without
the extra `cli`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socket import gethostname

from stepscope.errors import StepscopeError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.manifest.parts import read_parts
from stepscope.files.mirror import uncopied
from stepscope.files.storage.processes import is_running
from stepscope.mirror.copy import StepCopy, Store, copy_run_records, copy_step, open_store


def main(save_path: str, step: str, url: str, earlier: str) -> int:
    """Copy one step of a run and return the exit code. `earlier`: "yes" adds incomplete other steps."""
    os.umask(0o077)  # a copy in a folder is as private as its original
    run = RunLayout(Path(save_path))
    try:
        store = open_store(url)
    except StepscopeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    failed = copy_run(store, run, [run.step(int(step))], earlier=earlier == "yes", on_step=_print_failures)
    for name, reason in failed.items():
        sys.stderr.write(f"{name}: {reason}\n")
    return 3 if failed else 0


def _print_failures(copy: StepCopy) -> None:
    for name, reason in list(copy.failed.items())[:10]:
        sys.stderr.write(f"{copy.step.root.name}/{name}: {reason}\n")


def copy_run(
    store: Store,
    run: RunLayout,
    steps: Iterable[StepLayout],
    *,
    earlier: bool,
    on_step: Callable[[StepCopy], None],
) -> dict[str, str]:
    """Copy `steps`, then incomplete other steps if `earlier`, then the records of the run.

    Returns:
        Steps and records that could not be copied, and why. Other steps do not count.
    """
    failed: dict[str, str] = {}
    copied = set()
    for step in steps:
        copy = copy_step(store, step)
        copied.add(step.root)
        on_step(copy)
        if copy.failed:
            failed[step.root.name] = f"{len(copy.failed)} file(s) could not be copied"
    if earlier and not failed:
        for step in _incomplete(run, copied, store.url):
            on_step(copy_step(store, step))
    return failed | copy_run_records(store, run)


def _incomplete(run: RunLayout, copied: set[Path], url: str) -> Iterator[StepLayout]:
    """Yield steps that nobody records now and whose copy lacks files, for instance those of a killed run."""
    for step in run.steps().values():
        if step.root not in copied and not _is_open(step) and uncopied(step, gethostname(), url):
            yield step


def _is_open(step: StepLayout) -> bool:
    return any(
        part.closed is None and (part.process.host != gethostname() or is_running(part.process.pid))
        for part in read_parts(step)[0]
        if part.owner
    )
