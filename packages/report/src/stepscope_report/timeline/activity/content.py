"""Typed records of the content of a torch trace. Times are us on the trace's own clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec

from stepscope_report.timeline.activity.device_idle import DeviceGaps, GapKind
from stepscope_report.timeline.activity.flops import Flops
from stepscope_report.timeline.activity.intervals import Pair, unpacked
from stepscope_report.timeline.readers.chrome import Distributed

Work: TypeAlias = Literal["compute", "communication", "memory", "sync"]
"""Kind of a device's work. `sync`: a stream waited for another one, or recorded an event. Neither keeps the
device busy."""


class Requests(msgspec.Struct, frozen=True):
    """The requests of one engine iteration, as its annotation names them."""

    prefills: int
    """Requests whose prompt was processed in the iteration."""
    decodes: int
    """Requests that received a token in the iteration."""
    prefill_tokens: int | None = None
    mixed: bool = False
    """True if the engine does not distinguish prefills and decodes, so that `prefills` counts both."""


class Iteration(msgspec.Struct, gc=False):
    """One forward pass of an inference engine with at least one request, from the engine's annotation."""

    start_us: float
    dur_us: float
    prefills: int
    """This field and those below are the same as in `Requests`."""
    decodes: int
    prefill_tokens: int | None
    mixed: bool = False


class Operator(msgspec.Struct):
    """All calls of one operator on the CPU, with the same input shapes if the trace has shapes."""

    name: str
    shapes: str = ""
    """The shapes of the inputs in torch's form, `[[64, 128], [128, 32]]`; empty if the trace has none."""
    count: int = 0
    total_us: float = 0.0
    max_us: float = 0.0
    below_us: float = 0.0
    """Part of `total_us` in operators called by this operator."""
    outer: bool = False
    """True for a range of `record_function` or a decorator, False for an operator of a library."""

    @property
    def self_us(self) -> float:
        return self.total_us - self.below_us


class Kernel(msgspec.Struct):
    """All runs of one kernel, copy or fill on a device."""

    name: str
    work: Work
    count: int = 0
    total_us: float = 0.0
    max_us: float = 0.0


class Device(msgspec.Struct):
    """Activity of one device. In each time, an instant counts once, however many streams are busy then."""

    name: str
    first_us: float
    last_us: float
    busy_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    """Communication time without computation at the same time."""
    memory_us: float


class Stream(msgspec.Struct):
    """Computation on one stream of a device: the summed time of the stream's kernels."""

    device: str
    compute_us: float


class Peak(msgspec.Struct):
    """The largest amount of one device's memory that torch's allocator held, as `profile_memory`
    recorded it.
    """

    device: str
    allocated_bytes: int
    allocated_at_us: float
    reserved_bytes: int
    capacity_bytes: int | None
    """Memory of the device, or None if the trace does not state it."""


class ProfilerStep(msgspec.Struct):
    """One step of the program on the CPU. In each time except `idle`, an instant counts at most once."""

    number: int
    start_us: float
    dur_us: float
    busy_us: float | None
    """Time in which at least one device was busy, or None without a device."""
    exposed_us: float | None
    """Time of communication without computation, or None without a device."""
    loading_us: float
    """Time in which the program waited for the data loader."""
    optimizer_us: float
    """Time in `Optimizer.step`, on the CPU."""
    forward_us: float | None = None
    """CPU time in ranges whose names contain "forward", or None if the trace has none."""
    backward_us: float | None = None
    """CPU time in torch's backward pass and in ranges whose names contain "backward", or None if the trace
    has neither."""
    h2d_us: float | None = None
    """Time of copies from the host to a device, or None if the trace has none."""
    idle: dict[GapKind, float] = {}
    """{cause: time in us in which a device had nothing to run}, summed over the devices."""


class LabelTime(msgspec.Struct):
    """All ranges of one label inside the same surrounding labels."""

    path: tuple[str, ...]
    """Names of the surrounding labels and of the label itself, the outermost first."""
    count: int
    cpu_us: float
    busy_us: float | None
    """Time in which a device ran kernels that were launched within the label, or None if the trace has no
    launches."""
    communication_us: float | None
    kernels: int
    """Number of kernels that were launched within the label."""
    idle_us: float | None
    """Time within the label in which no device was busy, or None without a device."""
    idle: dict[GapKind, float]
    """{cause: time in us of the devices' gaps that were caused in this label, and in no label inside it}."""
    steps: dict[int, float] = {}
    """{number of a step: CPU time in us of the ranges that began in this step}."""


class Collective(msgspec.Struct):
    """All calls of one collective by this rank, in order."""

    name: str
    times: bytes
    """Start and end of each call in us, packed as doubles. A call then takes 16 bytes, which matters
    with many ranks."""

    def calls(self) -> Iterator[Pair]:
        return unpacked(memoryview(self.times).cast("d"))


class GroupCalls(msgspec.Struct):
    """All calls of one collective in one process group by this rank, if the trace names groups."""

    op: str
    group: str
    """Name and ranks of the group."""
    times: bytes
    """The times of the calls, packed as in `Collective`, in the order of the file."""
    numbers: bytes
    """Number of each call, packed as 64-bit integers. Torch gives a call the same number on all ranks. -1 if
    torch gave no number."""

    def calls(self) -> Iterator[tuple[int, Pair]]:
        """Yield (number, (start, end)) of each call, in order of the numbers. Calls without a number from
        torch are numbered from 0 in order of their starts.
        """
        times = unpacked(memoryview(self.times).cast("d"))
        numbers = memoryview(self.numbers).cast("q")
        if -1 in numbers:
            return enumerate(sorted(times))
        calls = zip(numbers, times, strict=True)
        ascending = all(before < after for before, after in pairwise(numbers))
        return calls if ascending else iter(sorted(dict(calls).items()))


class SizedCalls(msgspec.Struct):
    """All calls of one collective in one process group with one size."""

    op: str
    group: str
    """Name and ranks of the group."""
    ranks: int
    bytes: int
    count: int = 0
    total_us: float = 0.0
    best_us: float = float("inf")
    """Time of the fastest call."""
    nodes: int | None = None
    """Number of the group's hosts if `group` names no ranks; None if it names ranks."""

    def add(self, us: float) -> None:
        self.count += 1
        self.total_us += us
        self.best_us = min(self.best_us, us)


class TraceContent(msgspec.Struct, kw_only=True):
    """Content of a trace. Times are in us on the trace's own clock: unix ns = `base_ns` + us * 1000."""

    base_ns: int | None
    distributed: Distributed | None
    host: str | None
    first_us: float | None
    """Time of the first event, or None if nothing was recorded."""
    last_us: float | None
    events: int
    operators: list[Operator]
    operators_us: float
    """Time in which at least one operator ran on any thread."""
    waiting_us: float
    """Time in which a collective ran on the CPU and no operator ran."""
    kernels: list[Kernel]
    devices: list[Device]
    streams: list[Stream] = []
    sized: list[SizedCalls] = []
    collectives: list[Collective]
    grouped: list[GroupCalls] = []
    """The calls of collectives by process group. Collectives that a rank may leave before all ranks have
    entered are left out."""
    iterations: list[Iteration]
    memory: list[Peak]
    runtime: bool
    """True if the trace has calls into the runtime of a device (CUDA, HIP)."""
    device_names: list[str]
    """Names of the host's devices, as the trace lists them."""
    flops: Flops = msgspec.field(default_factory=Flops)
    """The FLOPs of matrix products and attention; empty if the trace has no shapes."""
    steps: list[ProfilerStep] = []
    """The steps of the program, from torch's profiler, a named range, or the optimizer's calls. Empty if
    there are none."""
    gaps: list[DeviceGaps] = []
    """Gaps of the devices by cause, call and place, the longest total first."""
    labels: list[LabelTime] = []
    """Times of each label. A label comes before the labels inside it."""
    problems: dict[str, int | None]
