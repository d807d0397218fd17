"""An `Executor` whose workers are tasks of a Ray cluster, each on a node that has the files of its call."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepscope.errors import RecordError
from stepscope.files.layout import SIDECAR_SUFFIX, StepLayout
from stepscope.files.storage.atomic import Arrival
from stepscope.timeline.execution.calls import WorkerDiedError, answer_to, call_of, result_of
from stepscope.timeline.execution.near import (
    NearFiles,
    NodeFiles,
    list_files,
    own_version,
    read_piece,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Part = TypeVar("_Part")
_SMALL = 1 << 20
"""Bytes up to which a file of the traces' folder is fetched: sidecars and summaries."""


@contextmanager
def connected(address: str, jobs: int | None = None) -> Iterator[RayNodes]:
    """Yield the nodes of the cluster at this address, or of the one that this process is connected to.

    Args:
        jobs: Tasks of each node at a time. None: one for each of its idle cores.

    Raises:
        RecordError: there is no cluster.
    """
    was_connected = ray.is_initialized()
    try:
        if not was_connected:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RecordError(f"no Ray cluster at {address!r} ({why}): run this on one of its nodes") from error
    nodes = RayNodes(jobs)
    try:
        with redirect_stdout(sys.stderr):  # Ray prints there that a node died
            yield nodes
    except BaseException:
        nodes.shutdown(cancel_futures=True)
        raise
    else:
        nodes.shutdown()
    finally:
        if not was_connected:
            ray.shutdown()


class RayNodes(NearFiles):
    """Tasks on the living nodes of a cluster. They reserve no CPU, which the training may hold all of."""

    def __init__(self, jobs: int | None = None) -> None:
        """Args:
        jobs: Tasks of each node at a time. None: one for each of its idle cores.
        """
        self.elsewhere: dict[Path, int] = {}
        alive = [node for node in _nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in alive)
        own = ray.get_runtime_context().get_node_id()
        self._nodes = [
            _Node(node["NodeID"], _name(node, hosts), jobs, here=node["NodeID"] == own) for node in alive
        ]

    def add_step(self, layout: StepLayout) -> None:
        """Find the files of a step on all nodes, and fetch what is small and missing here.

        Raises:
            RecordError: a node has another version of stepscope, or none.
            OSError: a file cannot be written here.
        """
        root = Path(os.path.abspath(layout.root))
        listings = {node: node.call(list_files, root) for node in self._nodes}
        for node, listing in listings.items():
            try:
                node.add(listing.result())
            except WorkerDiedError:
                continue  # its files stay missing, as those of a node that died before
        for node in self._nodes:
            for path, size in node.files.items():
                if not path.exists():
                    self._take(node, path, size, layout)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function on any node. Its arguments are positional."""
        if kwargs:
            raise TypeError(f"{fn} is called with {', '.join(kwargs)}; give positional arguments")
        return self._able(()).call(cast(Callable[..., _T], fn), *args)

    def submit_near(
        self,
        files: Sequence[Path],
        fn: Callable[[_Part], _T],
        part: _Part,
        then: Callable[[_T], _T] | None = None,
        away: Callable[[_Part], _Part] | None = None,
    ) -> Future[_T]:
        try:
            node = self._able(files)
        except WorkerDiedError as error:
            future = Future[_T]()
            future.set_exception(error)
            return future
        return node.call(fn, part if node.here or away is None else away(part), then=then)

    def node_with(self, files: Sequence[Path], host: str) -> str | None:
        able = [node.name for node in self._with(files)]
        return host if host in able else next(iter(able), None)

    def submit_at(self, node: str, fn: Callable[[_Part], _T], part: _Part) -> Future[_T]:
        return next(known for known in self._nodes if known.name == node).call(fn, part)

    def _able(self, files: Sequence[Path]) -> _Node:
        """Return the least busy node that has these files.

        Raises:
            WorkerDiedError: no living node has them.
        """
        if able := self._with(files):
            return min(able, key=lambda node: node.load)
        paths = _absolute(files)
        owners = ", ".join(sorted({node.name for node in self._nodes if paths & node.files.keys()}))
        why = f"the Ray nodes that have it died: {owners}" if owners else "no Ray node has it"
        raise WorkerDiedError(why)

    def _with(self, files: Sequence[Path]) -> list[_Node]:
        """Return the living nodes that have these files."""
        paths = _absolute(files)
        return [node for node in self._nodes if not node.gone and node.files.keys() >= paths]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return once all tasks are done; end them at once if `cancel_futures`."""
        if cancel_futures:
            self.kill()
        for node in self._nodes:
            node.threads.shutdown(wait, cancel_futures=cancel_futures)

    def kill(self) -> None:
        for node in self._nodes:
            node.kill()

    def _take(self, node: _Node, path: Path, size: int, layout: StepLayout) -> None:
        in_traces = path.is_relative_to(os.path.abspath(layout.traces))
        if in_traces and not path.name.endswith(SIDECAR_SUFFIX) and size > _SMALL:
            self.elsewhere[path] = size
            return
        with suppress(WorkerDiedError):
            _fetch(node, path, size)


class _Node:
    """A node of the cluster, and its tasks."""

    def __init__(self, node_id: str, name: str, jobs: int | None, *, here: bool) -> None:
        """`here`: This process runs on it."""
        self.name = name
        self.here = here
        self._id = node_id
        self.gone = False
        self.files: dict[Path, int] = {}
        """With their sizes in bytes."""
        self.threads = _threads(jobs or 1)
        """Each waits for one task."""
        self._jobs = jobs
        self._undone = set[Future[Any]]()
        self._running = set[Any]()
        self._over = False
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        # A task that dies is tried again by those who use its result.
        remote: Any = ray.remote  # its types know no affinity to a node
        self._task = remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(answer_to)

    @property
    def load(self) -> float:
        """Return the calls that are not done, for each that can run."""
        return len(self._undone) / (self._jobs or 1)

    def add(self, listing: NodeFiles) -> None:
        """Take over what the node says of itself.

        Raises:
            RecordError: it has another version of stepscope.
        """
        if listing.version != (here := own_version()):
            raise RecordError(
                f"the Ray node {self.name} has stepscope {listing.version}, and this machine {here}: "
                "install the same version on both"
            )
        self.files.update(listing.files)
        if self._jobs is None:
            self._jobs = listing.idle_cores
            self.threads.shutdown(wait=False)
            self.threads = _threads(self._jobs)

    def call(
        self, fn: Callable[..., _T], *args: object, then: Callable[[_T], _T] | None = None
    ) -> Future[_T]:
        future = self.threads.submit(self._run, fn, args, then)
        self._undone.add(future)
        future.add_done_callback(self._undone.discard)
        return future

    def kill(self) -> None:
        self._over = True
        for task in list(self._running):
            ray.cancel(task, force=True)

    def _run(self, fn: Callable[..., _T], args: tuple[object, ...], then: Callable[[_T], _T] | None) -> _T:
        if self._over:
            raise CancelledError
        try:
            with self._running_task(fn.__name__, call_of(fn, args)) as task:
                answer: bytes = ray.get(task)
        except RayTaskError as error:  # not of `fn`, whose errors are answers: stepscope was not imported
            why = str(error.cause).strip().splitlines()[-1]
            what = f"the Ray node {self.name} cannot run stepscope ({why})"
            raise RecordError(f"{what}: install stepscope {own_version()} there") from error
        except RayError as error:
            self.gone = not _is_alive(self._id)
            what = "it died" if self.gone else str(error).strip().partition("\n")[0]
            raise WorkerDiedError(f"on the Ray node {self.name}: {what}") from error
        result = result_of(answer, fn)
        return result if then is None else then(result)

    @contextmanager
    def _running_task(self, name: str, call: bytes) -> Iterator[Any]:
        task = self._task.options(name=f"stepscope.{name}").remote(call)
        self._running.add(task)
        if self._over:  # `kill` may not have seen it
            ray.cancel(task, force=True)
        try:
            yield task
        finally:
            self._running.discard(task)


def _absolute(files: Sequence[Path]) -> set[Path]:
    return {Path(os.path.abspath(path)) for path in files}


def _name(node: dict[str, Any], hosts: Mapping[str, int]) -> str:
    """Return the host's name, with the id of the node if several have that name, as containers may."""
    host: str = node["NodeManagerHostname"]
    return host if hosts[host] == 1 else f"{host}-{node['NodeID'][:8]}"


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="stepscope-ray")


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    return nodes


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in _nodes())


def _fetch(node: _Node, path: Path, size: int) -> None:
    """Copy a file here, under its name once it is whole."""
    arrival = Arrival(path)
    try:
        while arrival.bytes < size:
            piece = node.call(read_piece, path, arrival.bytes).result()
            if not piece:
                raise WorkerDiedError(f"{path} became shorter while it was fetched")
            arrival.add(piece)
        arrival.finish()
    except BaseException:
        arrival.give_up()
        raise
