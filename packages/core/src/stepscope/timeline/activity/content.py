"""Typed records of the content of a torch trace. Times are us on the trace's own clock."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.timeline.activity.flops import Flops
from stepscope.timeline.readers.chrome import Distributed

Work: TypeAlias = Literal["compute", "communication", "memory"]


class Requests(msgspec.Struct, frozen=True):
    """The requests of one engine iteration, as its annotation names them."""

    prefills: int
    """Requests whose prompt was processed in the iteration."""
    decodes: int
    """Requests that received a token in the iteration."""
    prefill_tokens: int | None = None
    mixed: bool = False
    """True if `prefills` counts requests of both kinds, because the engine does not separate them."""


class Iteration(msgspec.Struct, gc=False):
    """One forward pass of an inference engine over at least one request, by the engine's own annotation."""

    start_us: float
    dur_us: float
    prefills: int
    """As in `Requests`, like the fields below."""
    decodes: int
    prefill_tokens: int | None
    mixed: bool = False


class Operator(msgspec.Struct):
    """All calls of one operator on the CPU."""

    name: str
    count: int = 0
    total_us: float = 0.0
    max_us: float = 0.0
    below_us: float = 0.0
    """Part of the total that was spent in operators below it."""
    outer: bool = False
    """True if it is a mark of `record_function` or a decorator, and no operator of a library."""

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
    """Activity of one device over all its streams. No instant counts twice."""

    name: str
    first_us: float
    last_us: float
    busy_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    """Communication time that no computation overlaps."""
    memory_us: float


class Peak(msgspec.Struct):
    """The most memory that torch's allocator held of one device, as `profile_memory` recorded it."""

    device: str
    allocated_bytes: int
    allocated_at_us: float
    reserved_bytes: int
    capacity_bytes: int | None
    """Memory of the device. None: the trace does not state it."""


class Collective(msgspec.Struct):
    """All calls of one collective on this rank, in order."""

    name: str
    starts_us: list[float]
    ends_us: list[float]


class TraceContent(msgspec.Struct, kw_only=True):
    """Content of a trace. Times are us on its own clock: unix ns = `base_ns` + us * 1000."""

    base_ns: int | None
    distributed: Distributed | None
    host: str | None
    first_us: float | None
    """None: nothing was recorded."""
    last_us: float | None
    events: int
    operators: list[Operator]
    operators_us: float
    """Time in which at least one operator ran on any thread."""
    waiting_us: float
    """Time in which a collective on the CPU went on and no operator ran."""
    kernels: list[Kernel]
    devices: list[Device]
    collectives: list[Collective]
    iterations: list[Iteration]
    memory: list[Peak]
    runtime: bool
    """True if calls into CUDA, HIP or the like were recorded."""
    device_names: list[str]
    """Devices of the host, as the trace lists them."""
    flops: Flops = msgspec.field(default_factory=Flops)
    """Of matrix products and attention. Empty where the trace has no shapes."""
    problems: dict[str, int | None]
