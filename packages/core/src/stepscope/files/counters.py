"""Records of `counters/*.jsonl`: one JSON object a line, distinguished by the field `kind`.

A file has one `header`, then `series` and `sample` lines (each series before its first sample), then one
`end`. If a process did not close its capture, its file has no `end` and lacks at most the last second. Times
are CLOCK_MONOTONIC of the writing process in ns, as in `spans/*.jsonl`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stepscope.files.clock import ClockAnchor, Int
from stepscope.files.sidecar import ProcessInfo

CounterKind: TypeAlias = Literal["level", "interval", "total"]
"""Kind of a counter's values. `level`: the value at the time of the sample. `interval`: a value for the time
since the previous sample. `total`: a sum that only grows; its growth is of interest."""
CounterScope: TypeAlias = Literal["process", "host"]
"""`process` if a counter describes the process that samples it. `host` if it describes the host; one process
of each host samples it."""
BLOCKED_NS = 100_000_000
"""An event loop counts as blocked if it is late by more than this."""
IN = " in "
"""Separator in `Series.of` of a blocked event loop, between the loop's thread and the blocking call."""

# Names of the counters from which a report draws conclusions. A report shows all other counters too.
EVENT_LOOP = "event loop late"
GC = "garbage collector"
PROCESS_CPU = "process CPU"
HOST_CPU = "host CPU"
MEMORY_PRESSURE = "memory pressure"
CORE_WAIT = "main thread waits for a core"
THREAD_CORE_WAIT = "other threads wait for a core"
DISK_SLEEP = "main thread in disk sleep"
GPU = "GPU utilisation"
NPU = "NPU utilisation"
KV_CACHE = "KV cache"
PREEMPTIONS = "preemptions"
RUNNING_REQUESTS = "running requests"
WAITING_REQUESTS = "waiting requests"
UNFINISHED_REQUESTS = "unfinished requests"
GENERATION_TOKENS = "generation tokens"
GPU_MEMORY = "GPU memory"
GPU_THROTTLED = "GPU throttled"
NPU_MEMORY = "NPU memory"
TORCH_RESERVED = "torch reserved"


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    format: Int = 1
    step: Int
    run_id: str
    process: ProcessInfo
    anchor: ClockAnchor
    hz: float
    """Samples per second that the capture asked for."""


class Series(msgspec.Struct, frozen=True, kw_only=True, tag="series", tag_field="kind"):
    """One series of samples: one counter for one measured object."""

    series: Int
    """Number of the series, unique in the file."""
    name: str
    of: str = ""
    """The measured object: `GPU 3`, `replica 0`. Empty for the process or its host."""
    unit: str = ""
    how: CounterKind = "level"
    """Kind of the values, as `CounterSource.kind`."""
    scope: CounterScope = "process"


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="kind"):
    at_ns: Int
    """Time of the tick, CLOCK_MONOTONIC in ns."""
    values: dict[Int, float]
    """{number of a series: value}. Series without a sample at this time are left out."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    anchor: ClockAnchor
    samples: Int
    dropped: Int = 0
    """Number of samples that were not written, because there were too many."""
    absent: dict[str, str] = {}
    """{source: reason} of counters that could not be sampled."""


Line: TypeAlias = Header | Series | Sample | End
