"""Processes that read a command's traces: children of this one, or actors of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from stepscope.files.layout import StepLayout
from stepscope_report.cli.command import CommandError
from stepscope_report.timeline.processes import workers

if TYPE_CHECKING:
    from stepscope_report.cli.ray_nodes import RayNodes

RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Also read traces that only other nodes of a Ray cluster have. `auto`: the cluster of this "
        "machine.",
    ),
]


@contextmanager
def readers(
    jobs: int | None, ray: str | None, steps: list[StepLayout], size: Callable[[], int]
) -> Iterator[tuple[Executor | None, int]]:
    """Yield the executor that reads the traces of these steps (None for this process), and their size in
    bytes.

    Args:
        jobs: Processes, of each node with `ray`. None means one for each idle core.
        ray: Address of a cluster. None means processes of this machine.
        size: Returns the number of bytes that this machine has.
    """
    if ray is None:
        total = size()
        with workers(jobs, total) as executor:
            yield executor, total
        return
    with cluster(ray, jobs, steps) as nodes:
        yield nodes, size() + sum(nodes.elsewhere.values())


def absolute(path: Path, ray: str | None) -> Path:
    """Return a path that nodes of the cluster understand too."""
    return path if ray is None else Path(os.path.abspath(path))


@contextmanager
def cluster(address: str, jobs: int | None, steps: list[StepLayout]) -> Iterator[RayNodes]:
    """Yield the nodes of a Ray cluster, which know where the files of these steps are."""
    if find_spec("ray") is None:
        raise CommandError("--ray needs Ray: pip install ray, of the version of the cluster")
    from stepscope_report.cli.ray_nodes import connected  # Ray takes a second to import

    with connected(address, jobs) as nodes:
        for step in steps:
            nodes.add_step(step)
        yield nodes
