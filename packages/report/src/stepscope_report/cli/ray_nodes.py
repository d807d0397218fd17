"""An `Executor` whose workers are actors on the nodes of a Ray cluster that have the files of a call."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepscope.errors import RecordError
from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout
from stepscope.files.storage import PIECE, Arrival, files_below
from stepscope_report.timeline.processes import NearFiles, NodeLostError, idle_cores

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Part = TypeVar("_Part")
_REACH_S = 5.0
_SMALL = 1 << 20
"""Largest size in bytes of a file in the traces' folder that is always fetched. Such files are sidecars and
summaries."""


class NodeFiles(NamedTuple):
    """Files of a step on a node, and the number of idle cores there."""

    version: str
    """Version of stepscope on the node."""
    idle_cores: int
    files: dict[Path, int]
    """Sizes in bytes by absolute path."""


class Reader:
    """An actor that runs calls on a node, one at a time."""

    def call(self, fn: Callable[..., object], *args: object) -> object:
        return fn(*args)


def list_files(step: Path) -> NodeFiles:
    """List the files in a step's folder on the node where this runs.

    Args:
        step: Absolute path of the folder.
    """
    layout = StepLayout(step)
    folders = (layout.spans, layout.counters, layout.traces, layout.processes)
    files: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(files_below(folder))):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith("."):
                files[path] = path.stat().st_size
    return NodeFiles(version("stepscope"), idle_cores(), files)


def read_piece(path: Path, offset: int) -> bytes:
    """Return at most `PIECE` bytes of a file, starting at `offset`."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)


@contextmanager
def connected(address: str, jobs: int | None = None) -> Iterator[RayNodes]:
    """Yield the nodes of the Ray cluster at `address`, or of the cluster to which this process is connected
    already.

    Args:
        jobs: Number of actors on each node. None for one per idle core.

    Raises:
        RecordError: there is no cluster.
    """
    was_connected = ray.is_initialized()
    try:
        if not was_connected:
            check_reachable(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RecordError(f"no Ray cluster at {address!r} ({why}): run this on one of its nodes") from error
    nodes = RayNodes(jobs)
    try:
        with redirect_stdout(sys.stderr):  # Ray prints to stdout if a node dies
            yield nodes
    finally:
        nodes.kill()
        if not was_connected:
            ray.shutdown()


def check_reachable(address: str) -> None:
    """Try to connect to a cluster's address for a few seconds, because Ray itself would try for minutes.

    Raises:
        OSError: nothing listens there.
        ValueError: it is no address.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("allowed: auto, or HOST:PORT")
    with socket.create_connection((host, int(port)), timeout=_REACH_S):
        pass


class RayNodes(NearFiles):
    """Actors on the living nodes of a Ray cluster. They reserve no CPU, because a training run may have
    reserved all CPUs.
    """

    def __init__(self, jobs: int | None = None) -> None:
        """Find the living nodes.

        Args:
            jobs: Number of actors on each node. None for one per idle core.
        """
        self._jobs = jobs
        self._nodes = [_Node(node["NodeID"], node["NodeManagerHostname"]) for node in _alive()]
        self.elsewhere: dict[Path, int] = {}

    def add_step(self, layout: StepLayout) -> None:
        """Find the files of a step on all nodes, and fetch small files that this machine lacks.

        Raises:
            RecordError: a node has another version of stepscope, or none.
            OSError: a file cannot be written here.
        """
        root = Path(os.path.abspath(layout.root))
        for node in self._nodes:
            node.start(1)
        listings = {node: node.call(list_files, root) for node in self._nodes}
        for node, listing in listings.items():
            try:
                node.add(listing.result(), self._jobs)
            except NodeLostError:
                continue  # files of a dead node count as missing
        traces = os.path.abspath(layout.traces)
        for node in self._nodes:
            for path, size in node.files.items():
                if path.exists():
                    continue
                is_trace = path.is_relative_to(traces) and not path.name.endswith(SIDECAR_SUFFIX)
                if is_trace and size > _SMALL:
                    self.elsewhere[path] = size
                else:
                    node.fetch(path, size)

    def fetch_traces(self) -> None:
        """Fetch the traces that this machine lacks.

        Raises:
            OSError: a file cannot be written here.
        """
        for path, size in self.elsewhere.items():
            next(node for node in self._nodes if path in node.files).fetch(path, size)
        self.elsewhere = {}

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function on the least busy living node. Its arguments are positional."""
        return self._able(()).call(cast(Callable[..., _T], fn), *args)

    def submit_near(self, files: Sequence[Path], fn: Callable[[_Part], _T], part: _Part) -> Future[_T]:
        try:
            return self._able(files).call(fn, part)
        except NodeLostError as error:
            future = Future[_T]()
            future.set_exception(error)
            return future

    def _able(self, files: Sequence[Path]) -> _Node:
        """Return the least busy node that has all of these files.

        Raises:
            NodeLostError: no living node has them.
        """
        paths = {Path(os.path.abspath(path)) for path in files}
        owners = [node for node in self._nodes if paths <= node.files.keys()]
        if able := [node for node in owners if not node.lost]:
            return min(able, key=lambda node: node.load)
        names = ", ".join(sorted({node.name for node in owners}))
        raise NodeLostError(f"the Ray nodes that have it died: {names}" if names else "no Ray node has it")

    def kill(self) -> None:
        for node in self._nodes:
            node.kill()


class _Node:
    """A node of the cluster, and its actors."""

    def __init__(self, node_id: str, name: str) -> None:
        self.name = name
        self.files: dict[Path, int] = {}
        self.lost = False
        self._listed = False
        """True once the node has listed files. stepscope is then known to be installed there."""
        self._id = node_id
        self._undone: list[set[Future[Any]]] = []
        """Unfinished calls of each actor."""
        self._actors: list[Any] = []

    @property
    def load(self) -> float:
        """Return the number of unfinished calls per actor."""
        return sum(map(len, self._undone)) / max(1, len(self._actors))

    def start(self, count: int) -> None:
        """Start actors until the node has `count` of them."""
        where = NodeAffinitySchedulingStrategy(self._id, soft=False)
        options = {"num_cpus": 0, "max_restarts": 1, "max_task_retries": 1, "scheduling_strategy": where}
        for _ in range(count - len(self._actors)):
            self._actors.append(ray.remote(**options)(Reader).remote())  # type: ignore[call-overload]  # Ray's
            self._undone.append(set())

    def add(self, listing: NodeFiles, jobs: int | None) -> None:
        """Add the files that the node listed, and start its actors.

        Raises:
            RecordError: the node has another version of stepscope.
        """
        if listing.version != (here := version("stepscope")):
            raise RecordError(
                f"the Ray node {self.name} has stepscope {listing.version}, and this machine {here}: "
                "install the same version on both"
            )
        self._listed = True
        self.files.update(listing.files)
        self.start(listing.idle_cores if jobs is None else jobs)

    def call(self, fn: Callable[..., _T], *args: object) -> Future[_T]:
        """Run a function on the least busy actor.

        The future raises `NodeLostError` if the node died, and `RecordError` if the node has no stepscope.
        """
        future = Future[_T]()
        at = min(range(len(self._actors)), key=lambda at: len(self._undone[at]))
        self._undone[at].add(future)
        future.add_done_callback(self._undone[at].discard)
        answer: Future[_T] = self._actors[at].call.remote(fn, *args).future()
        answer.add_done_callback(lambda answer: self._hand_on(answer, future))
        return future

    def _hand_on(self, answer: Future[_T], future: Future[_T]) -> None:
        error = answer.exception()
        if error is None:
            future.set_result(answer.result())
        elif isinstance(error, RayTaskError) and self._listed:
            future.set_exception(error.cause)
        else:
            future.set_exception(self._failure(error))

    def _failure(self, error: BaseException) -> Exception:
        if not any(node["NodeID"] == self._id for node in _alive()):
            self.lost = True
            return NodeLostError(f"on the Ray node {self.name}: it died")
        why = str(error).strip().splitlines()[-1]
        if self._listed or isinstance(error, ActorUnavailableError):  # Ray may notice later
            return NodeLostError(f"on the Ray node {self.name}: {why}")
        fix = f"install stepscope {version('stepscope')} there"
        return RecordError(f"the Ray node {self.name} cannot run stepscope ({why}): {fix}")

    def fetch(self, path: Path, size: int) -> None:
        """Copy a file to this machine. The copy gets its final name when it is complete. If the node has
        died, the file stays missing.
        """
        arrival = Arrival(path)
        try:
            while arrival.bytes < size and (piece := self.call(read_piece, path, arrival.bytes).result()):
                arrival.add(piece)
        except NodeLostError:
            arrival.give_up()
        except BaseException:
            arrival.give_up()
            raise
        else:
            (arrival.finish if arrival.bytes >= size else arrival.give_up)()  # the file may have shrunk

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def _alive() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    return [node for node in nodes if node["Alive"]]
