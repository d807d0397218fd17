"""Sections of the configuration: recorders, limits, files, work after a capture, and Ascend's
profiler.
"""

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
"""The names that `nsys profile --trace` takes."""
Trigger: TypeAlias = Literal["slow", "exception", "hang", "signal"]
"""Events upon which the flight recorder writes steps."""


def _parse_activities(value: object, field: str) -> tuple[Activity, ...]:
    items = items_of(value)
    if items == []:
        fix = 'an empty list records nothing; write ["cpu", "cuda"] or leave it out'
        raise ConfigError(field, value, "a list of at least one activity", fix)
    for item in items or []:
        convert(Activity, item, field)
    listed = value if items is None else items
    taken: tuple[Activity, ...] = convert(tuple[Activity, ...], listed, field)  # type: ignore[assignment]  # by kind
    if len(set(taken)) < len(taken):
        raise ConfigError(field, value, "each activity once", f"write {list(dict.fromkeys(taken))}")
    return taken


def _parse_triggers(value: object, field: str) -> tuple[Trigger, ...]:
    listed = items_of(value)
    taken: tuple[Trigger, ...] = convert(tuple[Trigger, ...], value if listed is None else listed, field)  # type: ignore[assignment]  # by kind
    return tuple(dict.fromkeys(taken))


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """Mini-batches inside a window, as `torch.profiler.schedule` counts them.

    A window is the capture in `continuous` mode, one stage in `discrete` mode; the count starts with it.
    """

    _at: ClassVar[str] = "torch.schedule"

    skip_first: Count = 0
    """Mini-batches left out once, before the first cycle."""
    wait: Count = 0
    """Mini-batches left out at the start of each cycle."""
    warmup: Count = 0
    """Mini-batches profiled and thrown away: the profiler's own start-up cost falls into them."""
    active: AtLeastOne = 1
    """Mini-batches recorded in each cycle."""
    repeat: Count = 1
    """Cycles; 0 goes on until the window ends."""


class TorchConfig(Section, frozen=True, kw_only=True):
    """Settings of `torch.profiler`. Those that are off by default make steps slower and traces larger."""

    _at: ClassVar[str] = "torch"
    _parsers: ClassVar[Mapping[str, Parser]] = {"activities": _parse_activities}

    activities: tuple[Activity, ...] = ("cpu", "cuda")
    """Devices recorded. One that this torch build lacks is left out and named in the manifest."""
    with_stack: bool = False
    """Python stacks of every operator."""
    record_shapes: bool = False
    """Shapes of every operator's inputs."""
    profile_memory: bool = False
    """Allocations and frees of tensors."""
    with_flops: bool = False
    """Estimated floating-point operations of matrix products and convolutions."""
    all_threads: bool = False
    """Record threads other than the one that starts the window (costs more per operator)."""
    schedule: ScheduleConfig | None = None
    """Mini-batches of a window that are recorded; None records all of it."""


class CudaMemoryConfig(Section, frozen=True, kw_only=True):
    """Settings of the history of the CUDA caching allocator. Not yet run on a GPU.

    Snapshots are for https://pytorch.org/memory_viz.
    """

    _at: ClassVar[str] = "cuda_memory"

    max_entries: AtLeastOne = 100_000
    """Allocator events to keep, the newest."""
    stacks: Literal["none", "python", "all"] = "python"
    """Frames of each event: `none`, `python`, or `all` with C++."""
    on_oom: bool = True
    """Write a snapshot when CUDA runs out of memory during a capture."""
    oom_any_step: Literal["off", "snapshot", "history"] = "off"
    """The same at any step, with any `tool`. `snapshot`: current allocations; free until it happens.
    `history`: also their stacks; always records. Workers watch from `prepare` on, or from their first
    capture."""
    oom_snapshots: AtLeastOne = 8
    """Most snapshots of a run, in `oom/`. Later shortages leave only a `.json`."""


class NsysConfig(Section, frozen=True, kw_only=True):
    """Settings of Nsight Systems, which starts the process."""

    _at: ClassVar[str] = "nsys"

    trace: tuple[NsysTrace, ...] = ("cuda", "nvtx")
    """Value of nsys' `--trace`. Spans are markers only with `nvtx`. `osrt` and `python-gil` cost most."""
    report_seconds: Seconds = 120
    """Longest time that nsys may take to write a window's report, while the training goes on."""
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    """Further options of nsys, by their long names. Those of `nsys start`, such as `sample`, are given for
    each window; those of `nsys launch` in `runtime_env` and `command`."""


def parse_counters(value: object, field: str) -> CountersConfig:
    """Return the settings of counters: a mapping, or `off`, which YAML reads as false."""
    word = value.lower() if isinstance(value, str) else value
    if word is False or word == "off":
        return CountersConfig(hz=0)
    return take(CountersConfig, value, field)  # type: ignore[return-value]  # by kind


class CountersConfig(Section, frozen=True, kw_only=True):
    """Settings of the counters: CPU, memory, GPUs, event loops, the garbage collector, engines."""

    _at: ClassVar[str] = "counters"

    hz: Annotated[float, msgspec.Meta(ge=0, le=100)] = 10
    """Samples per second while a capture is open, in every process of the capture; 0 for no counters."""


class ThroughputConfig(Section, frozen=True, kw_only=True):
    """Figures from which a report computes the use of devices."""

    _at: ClassVar[str] = "throughput"

    flops_per_token: Positive | None = None
    """FLOPs of the trained model per training token, some 6 times its parameters. Forward is a third."""
    device_peak_tflops: Positive | None = None
    """Dense TFLOP/s of a device in the precision of the training; None for the BF16 figure of a known
    device."""


class BudgetConfig(Section, frozen=True, kw_only=True):
    """Limits. A capture that reaches one of them ends early and keeps what it has; the manifest says
    `truncated`.
    """

    _at: ClassVar[str] = "budget"

    seconds: Seconds = 300
    """A capture that is open longer is truncated."""
    trace_mb: AtLeastOne = 2048
    """MB of traces that one process writes in one capture; beyond it no further window opens."""
    export_seconds: Seconds = 600
    """Longest wait for files by calls that wait for them."""
    fanout_seconds: Seconds = 30
    """Deadline of one start or stop on one worker or replica."""
    spans: AtLeastOne = 1_000_000
    """Spans per process and capture; more are dropped and counted."""
    memory_mb: AtLeastOne | None = 32_768
    """MB by which a process may grow while its profiler records: the buffers are host memory."""
    free_mb: Count = 1024
    """MB that must be free in `save_path` when a capture begins; with less, spans alone are recorded."""
    run_trace_mb: AtLeastOne | None = None
    """MB of traces that all captures of the folder may take; beyond it spans alone are recorded."""
    keep_steps: AtLeastOne | None = None
    """Number of the newest captured steps of this run to keep. Older ones are removed."""


class ControlConfig(Section, frozen=True, kw_only=True):
    """Captures on demand: `stepscope trigger`, `stepscope.request_capture`, SIGUSR1."""

    _at: ClassVar[str] = "control"

    requests: bool = True
    """Listen for requests: look at `control.json` in `save_path` when a step begins."""
    poll_seconds: Seconds = 2
    """Time between two looks of a thread, which answers requests before the next step begins."""


class RecorderConfig(Section, frozen=True, kw_only=True):
    """Settings of the flight recorder: the steps that it keeps, and when it writes them."""

    _at: ClassVar[str] = "recorder"
    _parsers: ClassVar[Mapping[str, Parser]] = {"triggers": _parse_triggers}

    keep_steps: AtLeastOne = 20
    """Steps whose spans stay in memory."""
    memory_mb: AtLeastOne = 64
    """MB of spans in each process, attributes not counted, and of passes in each engine. Beyond it, the
    oldest are dropped."""
    triggers: tuple[Trigger, ...] = ("slow", "exception", "hang", "signal")
    """Events that write steps. `signal` is SIGTERM. A request (`stepscope trigger --last`) always does."""
    slow_factor: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    """A step is slow if it takes this many times the median of the last 50 of its kind. Never one of the
    first 10, and not if one of its kind was as long before."""
    hang_seconds: Seconds = 600
    """A step hangs if no span begins for this long in the process that bounds steps."""
    last: AtLeastOne = 2
    """Steps that a trigger writes: the one that caused it, and those before it."""
    per_trigger: AtLeastOne = 3
    """Times that each trigger writes in one run."""
    then_capture: Count = 0
    """Steps captured with the profilers after a slow one. None by default: nobody selected them."""


class ExportConfig(Section, frozen=True, kw_only=True):
    """Time and format of the export of traces to files."""

    _at: ClassVar[str] = "export"

    when: Literal["background", "deferred"] = "background"
    """`background`: a thread starts at once. `deferred`: not before `stepscope.flush()`, a wait on the
    result, the next capture, or exit; costs nothing inside the step."""
    compress: bool = True
    """Write `.json.gz` (igzip); otherwise plain `.json`, some ten times the size."""


def _parse_names(value: object, field: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(items_of(value) or ()))
    if not all(isinstance(name, str) and name for name in names) or (not names and value not in ([], (), "")):
        fix = "write [tensorboard, mlflow], or leave it out"
        raise ConfigError(field, value, "a list of names of writers", fix)
    return names  # type: ignore[return-value]  # str, as checked


class FinishConfig(Section, frozen=True, kw_only=True):
    """Work after each capture, by the process that opened it, once the files are there."""

    _at: ClassVar[str] = "finish"
    _parsers: ClassVar[Mapping[str, Parser]] = {
        "ranks": parse_ranks,
        "report_to": _parse_names,
    }

    command: str | None = None
    """A shell command, with STEPSCOPE_STEP_PATH and others in its environment."""
    report_to: tuple[str, ...] = ()
    """Writers of the step's figures: `tensorboard`, `wandb`, `mlflow`, `otel`, or another installed one."""
    gather: bool = True
    """Fetch over Ray the recordings of Ray workers on hosts that do not share `save_path`."""
    timeout_s: Seconds = 600
    """Limit for each of these programs, which is then killed with its children. At exit the process waits
    this long for each."""
    ranks: Ranks = "first"
    """Ranks that run these programs if each rank opens its own captures, without workers."""


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
"""Arguments of torch_npu that have their own field."""


def _parse_contents(value: object, field: str) -> tuple[NpuContent, ...]:
    """Return the contents; [] is the default: tools that record nothing then leave empty files."""
    items = items_of(value)
    if items == []:
        return _DEFAULT_CONTENTS  # type: ignore[return-value]  # two of the literals
    for item in items or []:
        convert(NpuContent, item, field)
    taken: tuple[NpuContent, ...] = convert(tuple[NpuContent, ...], items or value, field)  # type: ignore[assignment]  # by kind
    return tuple(dict.fromkeys(taken))


def _parse_domains(value: object, field: str) -> tuple[str, ...]:
    items = items_of(value)
    taken: tuple[str, ...] = convert(tuple[str, ...], value if items is None else items, field)  # type: ignore[assignment]  # by kind
    if any(not name.strip() for name in taken):
        raise ConfigError(field, value, "names of mstx domains", "take the empty name out")
    return taken


class NpuConfig(Section, frozen=True, kw_only=True):
    """Settings of `torch_npu.profiler`. Not yet run on an NPU.

    Those that are off by default make steps slower and data larger.
    """

    _at: ClassVar[str] = "npu"
    _parsers: ClassVar[Mapping[str, Parser]] = {
        "contents": _parse_contents,
        "domains_include": _parse_domains,
        "domains_exclude": _parse_domains,
    }

    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """Device detail, at growing cost: `level_none` (only markers), `level0`, `level1`, `level2`."""
    contents: tuple[NpuContent, ...] = _DEFAULT_CONTENTS  # type: ignore[assignment]  # two of the literals
    """Any of `npu`, `cpu`, `memory`, `shapes`, `module`, `stack`. `stack` costs most; `module` is cheaper. An
    empty list is this default."""
    aic_metrics: AicMetrics | None = None
    """Counters of the AI cores: `PipeUtilization`, `ArithmeticUtilization`, `Memory`, `MemoryL0`, `MemoryUB`,
    `MemoryAccess`, `ResourceConflictRatio`, `L2Cache`. Needs `level1` or `level2`."""
    l2_cache: bool = False
    """Hit rates of the L2 cache."""
    export: Literal["text", "db"] = "text"
    """Output of the analysis: `trace_view.json` with CSV tables, or one SQLite file."""
    analysis: bool = False
    """Analyse each recording after its window, in another process: minutes of CPU. `stepscope analyse` does
    it later."""
    markers: bool = True
    """An mstx range for every span. Needs NPU data, which is then recorded whatever `contents` says."""
    domains_include: tuple[str, ...] = ()
    """Record mstx ranges of these domains alone; none means all that are not excluded."""
    domains_exclude: tuple[str, ...] = ("communication",)
    """mstx domains left out. Without effect beside `domains_include`."""
    data_simplification: bool = True
    """Delete intermediate files after the analysis."""
    schedule: ScheduleConfig | None = None
    """Mini-batches of a window that are recorded; None records all of it."""
    extra: dict[str, ExtraValue] = msgspec.field(default_factory=dict)
    """Further arguments of `torch_npu.profiler._ExperimentalConfig`, passed through after a check that the
    installed one has them: `gc_detect_threshold`, `host_sys`, `sys_io`..."""

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
