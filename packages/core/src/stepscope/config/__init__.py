"""The run's configuration, read from YAML, Python or the environment into frozen structs that check their
fields.
"""

from __future__ import annotations

from stepscope.config._checks import (
    INSTALL_TORCH_NPU,
    WRITERS,
    check_finish,
    check_program,
    check_recorder,
    check_save_path,
    check_tool,
)
from stepscope.config._fields import closest
from stepscope.config._instrument import InstrumentConfig
from stepscope.config._profile import Mode, ProfileConfig, Settings, folder_of, resolve
from stepscope.config._roles import EngineConfig, IterationsConfig, RoleConfig
from stepscope.config._sections import (
    Activity,
    BudgetConfig,
    ControlConfig,
    CountersConfig,
    CudaMemoryConfig,
    ExportConfig,
    FinishConfig,
    NpuConfig,
    NsysConfig,
    RecorderConfig,
    ScheduleConfig,
    ThroughputConfig,
    TorchConfig,
    Trigger,
)
from stepscope.config._sources import RESERVED_VARIABLES, unknown_variables
from stepscope.config._steps import StepRange, parse_ranges, parse_steps

__all__ = [
    "INSTALL_TORCH_NPU",
    "RESERVED_VARIABLES",
    "WRITERS",
    "Activity",
    "BudgetConfig",
    "ControlConfig",
    "CountersConfig",
    "CudaMemoryConfig",
    "EngineConfig",
    "ExportConfig",
    "FinishConfig",
    "InstrumentConfig",
    "IterationsConfig",
    "Mode",
    "NpuConfig",
    "NsysConfig",
    "ProfileConfig",
    "RecorderConfig",
    "RoleConfig",
    "ScheduleConfig",
    "Settings",
    "StepRange",
    "ThroughputConfig",
    "TorchConfig",
    "Trigger",
    "check_finish",
    "check_program",
    "check_recorder",
    "check_save_path",
    "check_tool",
    "closest",
    "folder_of",
    "parse_ranges",
    "parse_steps",
    "resolve",
    "unknown_variables",
]
