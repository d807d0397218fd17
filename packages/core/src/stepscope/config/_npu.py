"""The section `npu`: settings of the Ascend profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

import msgspec

from stepscope.config._fields import Parser, Section, convert, dotted, items_of
from stepscope.config._sections import ScheduleConfig
from stepscope.errors import ConfigError

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
