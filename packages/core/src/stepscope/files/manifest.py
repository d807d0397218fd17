"""Records of the manifest: the expected results of a captured step, and their outcome.

Each process of a capture writes its own part, `processes/<key>.json`, and rewrites the file atomically at
each change, so that no two processes write the same file. `manifest.json` combines all parts. Readers combine
the parts themselves and do not need `manifest.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Literal, TypeAlias, TypeGuard

import msgspec

from stepscope.files.clock import ClockAnchor, ClockOffset, Int
from stepscope.files.sidecar import Artifact, ProcessInfo

Knob: TypeAlias = Literal[
    "agent_workers",
    "async_rollout",
    "balance_batch",
    "balance_requests",
    "checkpointing",
    "colocated",
    "cuda_graphs",
    "data_parallel",
    "dynamic_batch",
    "fast_weights",
    "kv_memory",
    "max_requests",
    "micro_batch",
    "micro_tokens",
    "mixed_prefill",
    "overlap_gradients",
    "oversampling",
    "partial_rollout",
    "prefix_caching",
    "replicas",
    "response_length",
    "reward_workers",
    "rollout_batch",
    "rollout_devices",
    "tensor_parallel",
    "tool_pool",
    "trajectories",
    "weight_bucket",
]
"""Names for what a setting controls, which are the same for all frameworks."""
KNOBS: Mapping[Knob, str] = {
    "agent_workers": "processes that run agents",
    "async_rollout": "the rollout of the next step runs beside the training",
    "balance_batch": "all ranks get equal work",
    "balance_requests": "a router gives requests to the replica that has fewer",
    "checkpointing": "activations are computed again rather than kept",
    "colocated": "rollout and training have the same devices",
    "cuda_graphs": "the engine replays graphs of kernels",
    "data_parallel": "data-parallel engines of a replica",
    "dynamic_batch": "micro-batches are filled by tokens",
    "fast_weights": "weights go from device to device",
    "kv_memory": "part of a device's memory for the engine",
    "max_requests": "requests that an engine serves at once",
    "micro_batch": "samples of a micro-batch",
    "micro_tokens": "tokens of a micro-batch",
    "mixed_prefill": "prompts are read in passes that write tokens too",
    "overlap_gradients": "communication runs beside computation",
    "oversampling": "prompts that are begun for a batch",
    "partial_rollout": "the training begins without the last trajectories, which go on later",
    "prefix_caching": "prompts that begin alike are read once",
    "replicas": "inference engines",
    "response_length": "tokens of an answer, at most",
    "reward_workers": "processes that compute rewards",
    "rollout_batch": "prompts of a batch",
    "rollout_devices": "devices of all inference engines together",
    "tensor_parallel": "devices of an inference engine",
    "tool_pool": "tools that run at once",
    "trajectories": "trajectories or requests in flight",
    "weight_bucket": "size of the pieces in which weights move",
}
"""{knob: description of its setting}, for docs/reference/settings.md."""
SWITCHES = frozenset(
    {
        "async_rollout",
        "balance_batch",
        "balance_requests",
        "checkpointing",
        "cuda_graphs",
        "dynamic_batch",
        "fast_weights",
        "mixed_prefill",
        "overlap_gradients",
        "partial_rollout",
        "prefix_caching",
    }
)
"""Knobs that can be switched on or off. `colocated` is a fact; the other knobs are numbers."""
Value: TypeAlias = bool | int | float | str | None
Named: TypeAlias = tuple[str, Value] | tuple[str, Value, bool | str]
"""(name, value) of a setting; for a switch, also the value that turns it on."""


def is_number(value: object) -> TypeGuard[bool | int | float | None]:
    """Return whether a value is a finite number, a boolean or None. Such a value cannot be a secret."""
    return value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value))


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a run."""

    knob: str
    """One of `KNOBS`."""
    name: str
    """Name of the setting in the framework: `actor_rollout_ref.rollout.max_num_seqs`."""
    value: bool | int | float | str | None = None
    """The current value, or None if the setting is unset."""
    better: bool | str | None = None
    """The value that turns a switch on, if the switch is off; else None."""


class FrameworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one framework or engine in one process, at most one for each knob."""

    framework: str
    version: str | None = None
    engine: bool = False
    """True for an inference engine. A framework above the engine may have settings with other names for the
    same knobs."""
    settings: tuple[Setting, ...] = ()


FORMAT = 2
"""Version of the format of the manifest and its parts."""

State: TypeAlias = Literal["ok", "pending", "partial", "missing", "failed", "skipped"]
"""State of an expected item. `pending`: not there yet. `missing` and `failed` are final, although files may
still come if `Expectation.pending` is set."""
Kind: TypeAlias = Literal["spans", "counters", "trace", "engine", "fetch", "after", "selection", "memory"]
"""Kind of an expected item. `spans`: the span file. `counters`: the file of counters. `trace`: a recording of
this process' profiler. `engine`: a recording of an inference engine. `fetch`: files from another host.
`after`: hooks and `finish`. `selection`: something that the configuration selects. `memory`: a snapshot of a
CUDA out-of-memory error."""
Pending: TypeAlias = Literal["closing", "exporting", "fetching", "running", "late"]
"""The event that a pending item waits for. `closing`: the process closes the capture. `exporting`: the file
is written. `fetching`: the file is fetched from another host. `running`: the program ends. `late`: an engine
writes its files after the deadline of its stop."""
EndedBy: TypeAlias = Literal["exception", "signal", "exit", "rollback"]
"""Cause of an early end. `exception`: an exception of the user's code. `signal`: SIGTERM. `exit`: the end of
the process. `rollback`: the capture failed to open."""
OpenedBy: TypeAlias = Literal["program", "instrument"]
"""Opener of a capture: the program's own code, or an `instrument` entry."""
_TROUBLE = ("missing", "partial", "failed")

AWAITED: dict[Pending, str] = {
    "closing": "nothing says that its process closed the capture",
    "exporting": "not exported yet",
    "fetching": "on its own host, which shares no folder with this one; not fetched yet",
    "running": "it has not run yet",
    "late": "its files may still come",
}
"""{awaited event: text of `Expectation.reason`}."""
IDLE = "idle"
"""Key in `ignored` if an engine ran no requests, so that it has no files although nothing failed."""
LATE = "late"
"""Key in `ignored` if an engine may still write files after its stop."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """A result that a process or an engine should produce, and its outcome."""

    name: str
    """Name of the result: `torch trace`, `torch trace of update_actor`, `spans`, `replica 1`..."""
    kind: Kind
    state: State
    pending: Pending | None = None
    """The awaited event, or None. With a `state` other than pending, the item has ended, and files may still
    come."""
    reason: str | None = None
    """The reason for `state`, for people; may be None only if `state` is ok."""
    artifacts: tuple[Artifact, ...] = ()
    truncated: str | None = None
    ignored: dict[str, str] = {}
    idle: bool = False
    """True if an engine ran no iteration while it was recorded, so that nothing is missing."""
    died: bool = False
    """True if the item is missing because its process died, or, for the kind `engine`, the engine's actor."""
    notes: tuple[str, ...] = ()
    """Remarks that are not problems, such as fewer engine iterations than requested."""


def _ignored_by_engine(item: Expectation) -> list[str]:
    if item.kind != "engine":
        return []
    return [f"{option} is ignored: {reason}" for option, reason in item.ignored.items() if option != LATE]


def of_engine(
    name: str,
    artifacts: tuple[Artifact, ...],
    ignored: dict[str, str],
    trouble: str | None = None,
    pending: Pending | None = None,
) -> Expectation:
    """Return the outcome of a replica that has written files.

    Args:
        trouble: The reason why files are missing, or None if all are there.
    """
    counts = [artifact.iterations for artifact in artifacts if artifact.iterations is not None]
    reason = trouble or cut_short(artifacts)
    return Expectation(
        name=name,
        kind="engine",
        state="partial" if reason else "ok",
        pending=pending,
        reason=reason,
        artifacts=artifacts,
        ignored=ignored,
        idle=bool(counts) and not any(counts),
        notes=tuple(dict.fromkeys(artifact.note for artifact in artifacts if artifact.note)),
    )


def cut_short(artifacts: tuple[Artifact, ...]) -> str | None:
    """Return the reason if other code ended the recording early, else None."""
    return next((item.truncated for item in artifacts if item.ended == "others" and item.truncated), None)


def awaited(name: str, kind: Kind, pending: Pending, *, truncated: str | None = None) -> Expectation:
    """Return the expectation of an item that is not there yet."""
    reason = AWAITED[pending]
    return Expectation(
        name=name, kind=kind, state="pending", pending=pending, reason=reason, truncated=truncated
    )


class Ending(msgspec.Struct, frozen=True):
    """Cause of a capture's early end."""

    by: EndedBy
    error: str
    """`ExceptionType: message`, or the reason why the process ended."""


class OwnCost(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of profiling in this process, in ns."""

    start_ns: Int = 0
    """Time to open the capture in this process, from the call of `capture` to `opened`, including waits for
    other processes."""
    stop_ns: Int = 0
    """Time to close the capture in this process, from `closed` to the return to the caller."""
    inside_ns: Int = 0
    """Time between `opened` and `closed` in which profilers were started and stopped around stages (discrete
    mode)."""
    export_ns: Int = 0
    """Time to write traces, by default in the background."""
    counters_ns: Int = 0
    """CPU time of the thread that samples counters."""
    spans_ns: Int = 0
    """Number of spans times the cost of one span, as measured in this process."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The device of a process, and the configured FLOPs."""

    device: str | None = None
    """Name of the device on which torch computes, or None if torch has not initialised a device."""
    gpu: Int | None = None
    """Number of the device in `nvidia-smi`, if it is a GPU and CUDA_VISIBLE_DEVICES has numbers; else
    None."""
    peak_tflops: float | None = None
    """Configured `throughput.device_peak_tflops`, or None."""
    flops_per_token: float | None = None
    """Configured `throughput.flops_per_token`, or None."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The event that made the flight recorder write a step."""

    trigger: str
    """`slow`, `exception`, `hang`, `signal` or `request`."""
    reason: str
    """The reason, for people."""
    running: bool = False
    """True if the step was still running when it was written."""


Fate: TypeAlias = Literal["expected", "gone", "died"]
"""Fate of a rank that may lack a part, in ascending order of what is known. `expected`: it should write a
part. `gone`: it has died, perhaps after the step. `died`: it died before the step ended."""
FATES: tuple[Fate, ...] = ("expected", "gone", "died")


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another rank of the job that has died, or that should write a part of the manifest for this step."""

    process: ProcessInfo
    fate: Fate


class ProcessPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the manifest that one process writes."""

    format: Int = FORMAT
    run_id: str
    step: Int
    process: ProcessInfo
    owner: bool
    """True for the process that opened the capture. Its part also lists workers and engines that did not
    answer."""
    capture: Int = 1
    """Number of this capture. A step that is retried has several captures in one process."""
    opened: ClockAnchor
    closed: ClockAnchor | None = None
    """Clock reading at the close of the capture, or None before the close."""
    imported_ns: Int | None = None
    """Unix time in ns at which the process had imported stepscope, or None in older files."""
    recorded: bool
    """True if a backend records this process, because its role and rank are selected."""
    why: str
    """Reason for the value of `recorded`, for people."""
    profiled: bool = False
    """True if a backend ran in this process and slowed it. An engine's own profiler does not count."""
    prepared: bool = False
    """True if `prepare` ran in this process before the capture."""
    roles: tuple[str, ...] = ()
    """All roles with work in this process: the role of the process, and the roles of its decorated methods
    and spans."""
    expected: tuple[Expectation, ...] = ()
    spans: Int = 0
    dropped: Int = 0
    cost: OwnCost = OwnCost()
    hardware: Hardware = Hardware()
    settings: tuple[FrameworkSettings, ...] = ()
    """Settings of this process' frameworks and engines that the report's advice may mention."""
    clocks: tuple[ClockOffset, ...] = ()
    """Offsets of other processes' clocks against the clock of this process. Set by the owner only."""
    opened_by: OpenedBy = "program"
    """Opener of the capture. Set by the owner only."""
    absent: tuple[Absent, ...] = ()
    """Expected participants that have no part. Set by the owner only."""
    began: dict[str, str] = {}
    """{`ProcessInfo.key`: name} of the workers that began, each of which should write a part. Set by the
    owner only."""
    peers: tuple[Peer, ...] = ()
    """Other ranks of the job that have died or should write a part, if each rank opens its own captures."""
    ended_by: EndedBy | None = None
    """Cause of an early end; None if the capture ended normally or has not ended."""
    error: str | None = None
    """`ExceptionType: message` of the user's exception, or the reason why the process ended; None if neither
    happened."""
    instrumented: dict[str, tuple[str, ...]] = {}
    """{`module:name` of a function that `instrument` wrapped in this process: its `role/stage`s}."""
    recorder: Recorded | None = None
    """The event that made the flight recorder write the step from memory, or None if the step was
    captured."""
    missed: dict[str, str] = {}
    """{`module:name` of a function of a preset that this process does not have: reason}. The owner logs these
    reasons."""

    @property
    def died(self) -> bool:
        """True if the process is known to have ended before it had written everything."""
        return any(item.died and item.kind != "engine" for item in self.expected)


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or replica that did not take part in the capture, or died during the capture."""

    name: str
    state: State
    reason: str
    process: str | None = None
    """`ProcessInfo.key` of the worker, or None if the worker never answered."""
    died: bool = False
    """True if Ray, or a rank on the same host, reported that the process died in the step."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`, which combines all parts of one step."""

    format: Int = FORMAT
    run_id: str
    step: Int
    state: State
    """The worst state of all items; `skipped` only if there is no other state."""
    processes: tuple[ProcessPart, ...]

    @property
    def opened_by(self) -> OpenedBy:
        """Opener of the capture. If several processes opened it, `instrument` takes precedence."""
        owners = [part.opened_by for part in self.processes if part.owner]
        return "instrument" if "instrument" in owners else "program"

    @property
    def recorder(self) -> Recorded | None:
        """The event that made the flight recorder write the step, or None if the step was captured."""
        owners_first = sorted(self.processes, key=lambda part: not part.owner)
        return next((part.recorder for part in owners_first if part.recorder is not None), None)

    def problems(self) -> list[str]:
        """Return a line for each item that is missing, partial or failed, with the reason."""
        absent = [item for part in self.processes for item in part.absent if item.state in _TROUBLE]
        lines = [f"{item.name}: {item.state}: {item.reason}" for item in absent]
        return lines + self._lines(lambda item: item.state in _TROUBLE)

    def awaited(self, *, only: Pending | None = None, but: Pending | None = None) -> list[str]:
        """Return a line for each item that is not there yet, with the reason.

        Args:
            only: List only items that wait for this event; by default all items.
            but: Leave out items that wait for this event.
        """
        return self._lines(
            lambda item: item.state == "pending" and item.pending != but and only in (None, item.pending)
        )

    def warnings(self) -> list[str]:
        """Return a line for each process or engine that the configuration selects but that did not take
        part.
        """
        return self._lines(lambda item: (item.kind, item.state) == ("selection", "skipped"))

    def notes(self) -> list[str]:
        """Return a line for each note on a recording, and for each option that an engine ignored."""
        return [
            f"{part.process.key}: {item.name}: {note}"
            for part in self.processes
            for item in part.expected
            for note in (*item.notes, *_ignored_by_engine(item))
        ]

    def _lines(self, wanted: Callable[[Expectation], bool]) -> list[str]:
        return [
            f"{part.process.key}: {item.name}: {item.state}: {item.reason}"
            for part in self.processes
            for item in part.expected
            if wanted(item)
        ]
