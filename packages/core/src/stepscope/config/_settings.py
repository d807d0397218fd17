"""Types of the settings that `ProfileConfig` and `configure` take. Only type checkers import them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypedDict

from stepscope.config._instrument import InstrumentConfig
from stepscope.config._npu import NpuConfig
from stepscope.config._profile import Mode, Record
from stepscope.config._roles import RoleConfig
from stepscope.config._sections import (
    BudgetConfig,
    ControlConfig,
    CountersConfig,
    CudaMemoryConfig,
    ExportConfig,
    FinishConfig,
    NsysConfig,
    RecorderConfig,
    ThroughputConfig,
    TorchConfig,
)
from stepscope.config._steps import StepSpec


class Settings(TypedDict, total=False):
    """Settings in every form that is accepted. The fields of `ProfileConfig` have the form that is kept."""

    save_path: str | os.PathLike[str]
    steps: StepSpec | Iterable[StepSpec]
    tool: str
    mode: Mode
    record: Record
    recorder: RecorderConfig | Mapping[str, object]
    roles: Mapping[str, RoleConfig | Mapping[str, object]]
    redact: str | Iterable[str]
    instrument: Iterable[InstrumentConfig | Mapping[str, object] | str]
    torch: TorchConfig | Mapping[str, object]
    npu: NpuConfig | Mapping[str, object]
    nsys: NsysConfig | Mapping[str, object]
    cuda_memory: CudaMemoryConfig | Mapping[str, object]
    counters: CountersConfig | Mapping[str, object] | str | bool
    throughput: ThroughputConfig | Mapping[str, object]
    budget: BudgetConfig | Mapping[str, object]
    export: ExportConfig | Mapping[str, object]
    control: ControlConfig | Mapping[str, object]
    finish: FinishConfig | Mapping[str, object]
