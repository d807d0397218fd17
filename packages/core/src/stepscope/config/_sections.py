"""Sections of the configuration: profilers, limits, files, and work after a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from stepscope.config._fields import (
    AtLeastOne,
    Count,
    Parser,
    Positive,
    Seconds,
    Section,
    convert,
    dotted,
    items_of,
    take,
)
from stepscope.config._roles import Ranks, parse_ranks
from stepscope.errors import ConfigError

Activity: TypeAlias = Literal["cpu", "cuda", "xpu", "mtia", "hpu", "privateuse1"]
"""The names of `torch.profiler.ProfilerActivity`."""
NsysTrace: TypeAlias = Literal[
    "cuda", "nvtx", "osrt", "cublas", "cudnn", "ucx", "mpi", "nccl", "python-gil", "opengl", "vulkan"
]
"""The names that `nsys profile --trace` accepts."""
Trigger: TypeAlias = Literal["slow", "exception", "hang", "signal"]
"""Events that make the flight recorder write steps."""


def _parse_activities(value: object, field: str) -> tuple[Activity, ...]:
    items = items_of(value)
    if items == []:
        fix = 'an empty list records nothing; write ["cpu", "cuda"] or leave it out'
        raise ConfigError(field, value, "a list of at least one activity", fix)
    for item in items or []:
        convert(Activity, item, field)
    listed = value if items is None else items
    taken: tuple[Activity, ...] = convert(tuple[Activity, ...], listed, field)  # type: ignore[assignment]  # of type `kind`
    if len(set(taken)) < len(taken):
        raise ConfigError(field, value, "each activity once", f"write {list(dict.fromkeys(taken))}")
    return taken


def _parse_triggers(value: object, field: str) -> tuple[Trigger, ...]:
    listed = items_of(value)
    taken: tuple[Trigger, ...] = convert(tuple[Trigger, ...], value if listed is None else listed, field)  # type: ignore[assignment]  # of type `kind`
    return tuple(dict.fromkeys(taken))


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """Mini-batches to record in a window, as `torch.profiler.schedule` counts them.

    A window is the whole capture in `continuous` mode and one stage in `discrete` mode. Each window counts
    its mini-batches from 0.
    """

    _at: ClassVar[str] = "torch.schedule"

    skip_first: Count = 0
    """Mini-batches to skip once, before the first cycle."""
    wait: Count = 0
    """Mini-batches to skip at the start of each cycle."""
    warmup: Count = 0
    """Mini-batches of each cycle that are profiled and discarded, because the profiler's start-up slows these
    mini-batches."""
    active: AtLeastOne = 1
    """Mini-batches to record in each cycle."""
    repeat: Count = 1
    """Number of cycles; 0 repeats until the window ends."""


class TorchConfig(Section, frozen=True, kw_only=True):
    """Settings of `torch.profiler`. Switches that are off by default make steps slower and traces larger."""

    _at: ClassVar[str] = "torch"
    _parsers: ClassVar[Mapping[str, Parser]] = {"activities": _parse_activities}

    activities: tuple[Activity, ...] = ("cpu", "cuda")
    """Activities to record. An activity that this machine lacks is left out and named in the manifest."""
    with_stack: bool = False
    """Record the Python stack of every operator."""
    record_shapes: bool = False
    """Record the shapes of every operator's inputs."""
    profile_memory: bool = False
    """Record allocations and frees of tensors."""
    with_flops: bool = False
    """Estimate the floating-point operations of matrix products and convolutions."""
    all_threads: bool = False
    """Record threads other than the one that starts the window (costs more per operator)."""
    schedule: ScheduleConfig | None = None
    """Mini-batches of a window to record; None records the whole window."""


class CudaMemoryConfig(Section, frozen=True, kw_only=True):
    """Settings of the history of the CUDA caching allocator. Not yet run on a GPU.

    https://pytorch.org/memory_viz shows the snapshots.
    """

    _at: ClassVar[str] = "cuda_memory"

    max_entries: AtLeastOne = 100_000
    """Largest number of allocator events to keep; the oldest are dropped."""
    stacks: Literal["none", "python", "all"] = "python"
    """Stack frames of each event: `none`, `python`, or `all` (Python and C++)."""
    on_oom: bool = True
    """Write a snapshot when CUDA runs out of memory during a capture."""
    oom_any_step: Literal["off", "snapshot", "history"] = "off"
    """Snapshot at an out-of-memory error outside captures too, with any `tool`. `off`: none. `snapshot`: the
    current allocations, at no cost before the error. `history`: also their stacks, which are recorded in
    every step. In workers, this works after `prepare` or after their first capture."""
    oom_snapshots: AtLeastOne = 8
    """Largest number of snapshots in `oom/` per run. A later error leaves only a `.json`."""


class NsysConfig(Section, frozen=True, kw_only=True):
    """Settings of Nsight Systems. `nsys` must start the process."""

    _at: ClassVar[str] = "nsys"

    trace: tuple[NsysTrace, ...] = ("cuda", "nvtx")
    """Value of nsys' `--trace`. Spans become markers only with `nvtx`. `osrt` and `python-gil` cost most."""
    report_seconds: Seconds = 120
    """Longest time for nsys to write a window's report. The training continues meanwhile."""
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    """Further options of nsys: {long name: value}. Options of `nsys start`, such as `sample`, apply to each
    window; options of `nsys launch` go into `stepscope.backends.nsys.runtime_env` and `command`."""


def parse_counters(value: object, field: str) -> CountersConfig:
    """Return the settings of counters: a mapping, or `off`, which YAML reads as false."""
    word = value.lower() if isinstance(value, str) else value
    if word is False or word == "off":
        return CountersConfig(hz=0)
    return take(CountersConfig, value, field)  # type: ignore[return-value]  # of type `kind`


class CountersConfig(Section, frozen=True, kw_only=True):
    """Settings of the counters: CPU, memory, GPUs, event loops, the garbage collector, engines."""

    _at: ClassVar[str] = "counters"

    hz: Annotated[float, msgspec.Meta(ge=0, le=100)] = 10
    """Samples per second while a capture is open, in every process of the capture; 0 for no counters."""


class ThroughputConfig(Section, frozen=True, kw_only=True):
    """Figures from which a report computes the MFU of devices."""

    _at: ClassVar[str] = "throughput"

    flops_per_token: Positive | None = None
    """FLOPs of the trained model per training token, forward and backward: about 6 times its number of
    parameters. If null, only operators in traces give FLOPs."""
    device_peak_tflops: Positive | None = None
    """Dense TFLOP/s of a device in the precision of the training. If null, reports use the BF16 figure of a
    known device."""


class BudgetConfig(Section, frozen=True, kw_only=True):
    """Limits of captures. `seconds` and `memory_mb` end a capture early: its recordings so far are kept, and
    the manifest marks them as `truncated`.
    """

    _at: ClassVar[str] = "budget"

    seconds: Seconds = 300
    """Longest time that a capture stays open."""
    trace_mb: AtLeastOne = 2048
    """Maximum size in MB of the traces of one process in one capture. Beyond this size, no further window
    opens."""
    export_seconds: Seconds = 600
    """Longest time that a call waits for files."""
    fanout_seconds: Seconds = 30
    """Longest time for one worker or replica to start or stop."""
    spans: AtLeastOne = 1_000_000
    """Maximum number of spans per process and capture. Further spans are dropped and counted."""
    memory_mb: AtLeastOne | None = 32_768
    """Maximum growth in MB of a process' host memory during a capture. This memory contains the profiler's
    buffers. If null, no limit."""
    free_mb: Count = 1024
    """Free space in MB that `save_path` needs when a capture begins. With less, only spans are recorded."""
    run_trace_mb: AtLeastOne | None = None
    """Maximum size in MB of the traces of all captures in the folder. Beyond this size, only spans are
    recorded. If null, no limit."""
    keep_steps: AtLeastOne | None = None
    """Number of this run's captured steps to keep. Older steps are deleted. If null, all are kept."""


class ControlConfig(Section, frozen=True, kw_only=True):
    """Captures on demand: `stepscope trigger`, `stepscope.request_capture`, SIGUSR1."""

    _at: ClassVar[str] = "control"

    requests: bool = True
    """Listen for requests: read `control.json` in `save_path` when a step begins."""
    poll_seconds: Seconds = 2
    """Interval at which a thread reads `control.json`, so that requests are answered before the next step
    begins."""


class RecorderConfig(Section, frozen=True, kw_only=True):
    """Settings of the flight recorder: the steps that it keeps, and the events that write them."""

    _at: ClassVar[str] = "recorder"
    _parsers: ClassVar[Mapping[str, Parser]] = {"triggers": _parse_triggers}

    keep_steps: AtLeastOne = 20
    """Steps whose spans stay in memory."""
    memory_mb: AtLeastOne = 64
    """Maximum size in MB of the kept spans in each process (without their attributes), and of the kept passes
    in each engine. The oldest are dropped."""
    triggers: tuple[Trigger, ...] = ("slow", "exception", "hang", "signal")
    """Events that write steps. `signal` is SIGTERM. A request (`stepscope trigger --last`) always writes
    steps."""
    slow_factor: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    """A step is slow if it takes this many times the median of the steps of its kind among the last 50, or of
    all 50 if fewer than 3 are of its kind. The first 10 steps are never slow. A step that takes as long as an
    earlier long step of its kind is not slow either."""
    hang_seconds: Seconds = 600
    """A step hangs if no span begins for this long in the process that begins and ends steps."""
    last: AtLeastOne = 2
    """Number of steps that a trigger writes: the step of the event and the steps before it."""
    per_trigger: AtLeastOne = 3
    """Largest number of times that each trigger writes in one run."""
    then_capture: Count = 0
    """Number of steps to capture with the profilers after a slow step."""


class ExportConfig(Section, frozen=True, kw_only=True):
    """Time and format of the export of traces to files."""

    _at: ClassVar[str] = "export"

    when: Literal["background", "deferred"] = "background"
    """`background`: a thread exports at once. `deferred`: the export begins at `stepscope.flush()`, a wait
    for the result, the next capture, or exit, and costs nothing inside the step."""
    compress: bool = True
    """Write `.json.gz` instead of `.json`, which is about ten times larger."""


def _parse_names(value: object, field: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(items_of(value) or ()))
    if not all(isinstance(name, str) and name for name in names) or (not names and value not in ([], (), "")):
        fix = "write [tensorboard, mlflow], or leave it out"
        raise ConfigError(field, value, "a list of names of writers", fix)
    return names  # type: ignore[return-value]  # str, as checked


class FinishConfig(Section, frozen=True, kw_only=True):
    """Work after each capture, in the process that opened it, once all files are written."""

    _at: ClassVar[str] = "finish"
    _parsers: ClassVar[Mapping[str, Parser]] = {
        "ranks": parse_ranks,
        "report_to": _parse_names,
    }

    command: str | None = None
    """Shell command to run. The variable STEPSCOPE_STEP_PATH has the step's folder."""
    report_to: tuple[str, ...] = ()
    """Writers of the step's figures: `tensorboard`, `wandb`, `mlflow`, `otel`, or other installed writers."""
    gather: bool = True
    """Fetch recordings over Ray from hosts that do not share `save_path`."""
    timeout_s: Seconds = 600
    """Time limit of the command, and of the program that runs the writers. Each is killed after this time,
    with its children. At exit the process waits for both."""
    ranks: Ranks = "first"
    """Ranks that run the command and the writers, if each rank opens its own captures without workers."""


NpuContent: TypeAlias = Literal["npu", "cpu", "memory", "shapes", "module", "stack"]
AicMetrics: TypeAlias = Literal[
    "PipeUtilization",
    "ArithmeticUtilization",
    "Memory",
    "MemoryL0",
    "MemoryUB",
    "MemoryAccess",
    "ResourceConflictRatio",
    "L2Cache",
]
"""The names of `torch_npu.profiler.AiCMetrics`."""
ExtraValue: TypeAlias = str | int | float | bool | list[str] | None

_DEFAULT_CONTENTS = ("npu", "cpu")
_NAMED_HERE = {
    "profiler_level": "npu.level",
    "aic_metrics": "npu.aic_metrics",
    "l2_cache": "npu.l2_cache",
    "msprof_tx": "npu.markers",
    "mstx": "npu.markers",
    "data_simplification": "npu.data_simplification",
    "export_type": "npu.export",
    "mstx_domain_include": "npu.domains_include",
    "mstx_domain_exclude": "npu.domains_exclude",
}
"""{argument of torch_npu's `_ExperimentalConfig`: the setting that replaces it}."""


def _parse_contents(value: object, field: str) -> tuple[NpuContent, ...]:
    """Return the contents. An empty list means the default, because a profiler without contents writes empty
    files.
    """
    items = items_of(value)
    if items == []:
        return _DEFAULT_CONTENTS  # type: ignore[return-value]  # two of the literals
    for item in items or []:
        convert(NpuContent, item, field)
    taken: tuple[NpuContent, ...] = convert(tuple[NpuContent, ...], items or value, field)  # type: ignore[assignment]  # of type `kind`
    return tuple(dict.fromkeys(taken))


def _parse_domains(value: object, field: str) -> tuple[str, ...]:
    items = items_of(value)
    taken: tuple[str, ...] = convert(tuple[str, ...], value if items is None else items, field)  # type: ignore[assignment]  # of type `kind`
    if any(not name.strip() for name in taken):
        raise ConfigError(field, value, "names of mstx domains", "take the empty name out")
    return taken


class NpuConfig(Section, frozen=True, kw_only=True):
    """Settings of `torch_npu.profiler`. Not yet run on an NPU.

    Each switch that is off by default makes steps slower and recordings larger.
    """

    _at: ClassVar[str] = "npu"
    _parsers: ClassVar[Mapping[str, Parser]] = {
        "contents": _parse_contents,
        "domains_include": _parse_domains,
        "domains_exclude": _parse_domains,
    }

    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """Detail of device data, at growing cost: `level_none` (only markers), `level0`, `level1`, `level2`."""
    contents: tuple[NpuContent, ...] = _DEFAULT_CONTENTS  # type: ignore[assignment]  # two of the literals
    """Any of `npu`, `cpu`, `memory`, `shapes`, `module`, `stack`. `stack` costs most; `module` is cheaper. An
    empty list means the default."""
    aic_metrics: AicMetrics | None = None
    """Counters of the AI cores: `PipeUtilization`, `ArithmeticUtilization`, `Memory`, `MemoryL0`, `MemoryUB`,
    `MemoryAccess`, `ResourceConflictRatio`, `L2Cache`. Needs `level1` or `level2`."""
    l2_cache: bool = False
    """Record hit rates of the L2 cache."""
    export: Literal["text", "db"] = "text"
    """Output of the analysis: `trace_view.json` and CSV tables (`text`), or one SQLite file (`db`)."""
    analysis: bool = False
    """Analyse each recording after its window, in another process. This takes minutes of CPU. If false,
    `stepscope analyse` can analyse the recordings later."""
    markers: bool = True
    """Write an mstx range for every span. NPU data is then recorded even if `contents` lacks `npu`."""
    domains_include: tuple[str, ...] = ()
    """Record only mstx ranges of these domains. If empty, all domains that are not excluded."""
    domains_exclude: tuple[str, ...] = ("communication",)
    """mstx domains to leave out. No effect if `domains_include` is set."""
    data_simplification: bool = True
    """Delete intermediate files after the analysis."""
    schedule: ScheduleConfig | None = None
    """Mini-batches of a window to record; None records the whole window."""
    extra: dict[str, ExtraValue] = msgspec.field(default_factory=dict)
    """Further arguments of `torch_npu.profiler._ExperimentalConfig`: `gc_detect_threshold`, `host_sys`,
    `sys_io`... An argument that the installed torch_npu lacks is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aic_metrics is not None and self.level in ("level_none", "level0"):
            allowed = f"nothing at npu.level {self.level}, which has no counters"
            raise ConfigError(dotted(self._at, "aic_metrics"), self.aic_metrics, allowed, "npu.level: level1")
        if self.level == "level_none" and not self.markers:
            allowed = "true at npu.level level_none, which records markers alone"
            raise ConfigError(dotted(self._at, "markers"), False, allowed, "npu.level: level0")
        for name in self.extra:
            if name in _NAMED_HERE:
                allowed = "arguments of torch_npu's _ExperimentalConfig that have no field of their own"
                raise ConfigError(dotted(self._at, "extra"), name, allowed, f"set {_NAMED_HERE[name]}")
