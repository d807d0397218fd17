"""The real Python code of an unpacked torch_npu wheel, over a stand-in for the compiled modules.

All modules below `torch_npu` are the wheel's files, with three exceptions. The `__init__.py` of `torch_npu`,
`torch_npu.npu` and `torch_npu.utils` are not executed, because they load the device runtime.
`torch_npu._C._profiler` and `torch_npu._C._mstx` are made here, and note every call. `torch_npu.npu` has only
the few names below.

The stand-in accepts the arguments of the compiled classes (as `libtorch_npu.so` 2.13.0 prints them) and
raises TypeError for other arguments, as pybind11 does. It writes `FRAMEWORK/torch.op_range` at the stop, and
`PROF_*/host/ranges.json` with the mstx ranges when the recording is finalized. The contents have a format of
their own, and there is no device data.
"""

from __future__ import annotations

import enum
import importlib
import itertools
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ARGUMENTS = {
    "trace_level": str,
    "metrics": str,
    "l2_cache": bool,
    "record_op_args": bool,
    "msprof_tx": bool,
    "op_attr": bool,
    "host_sys": list,
    "mstx_domain_include": list,
    "mstx_domain_exclude": list,
    "sys_io": bool,
    "sys_interconnection": bool,
}


class Activity(enum.Enum):
    CPU = 0
    NPU = 1

    def __str__(self) -> str:
        return f"ProfilerActivity.{self.name}"


class ExperimentalConfig:
    def __init__(self, **arguments: Any) -> None:
        for name, value in arguments.items():
            if not isinstance(value, ARGUMENTS.get(name, ())):
                raise TypeError(f"_ExperimentalConfig: incompatible argument {name}={value!r}")
        self.arguments = arguments

    def __repr__(self) -> str:
        return ", ".join(
            f"{name}={sorted(value) if isinstance(value, list) else value!r}"  # the wheel makes lists of sets
            for name, value in sorted(self.arguments.items())
        )


class Config:
    FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")

    def __init__(self, path: str, *rest: Any) -> None:
        *flags, self.experimental = rest
        if type(path) is not str or not isinstance(self.experimental, ExperimentalConfig):
            raise TypeError("NpuProfilerConfig: incompatible arguments")
        if len(flags) != len(self.FLAGS) or not all(isinstance(flag, bool) for flag in flags):
            raise TypeError("NpuProfilerConfig: incompatible flags")
        self.path = path
        self.flags = [name for name, flag in zip(self.FLAGS, flags, strict=True) if flag]

    def __repr__(self) -> str:
        return f"[{' '.join(self.flags)}] {self.experimental}"


class Compiled:
    """The stand-in. As in the real C++, two recordings at once silently share one state."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """All calls in order, without times and paths."""
        self.fails: dict[str, str] = {}
        """{function that raises RuntimeError: message}."""
        self.no_prof = False
        """True if CANN shall record nothing, without an error."""
        self.device = 0
        self._path = ""
        self._activities: set[Activity] = set()
        self._config: Config | None = None
        self._recording = False
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[str, int]] = {}
        self._here = threading.local()
        self._ranges: list[dict[str, object]] = []

    def note(self, name: str, *arguments: object) -> None:
        self.calls.append(f"{name}({', '.join(map(str, arguments))})")
        if name in self.fails:
            raise RuntimeError(self.fails[name])

    # torch_npu._C._profiler

    def init(self, path: str, activities: set[Activity]) -> None:
        self.note("_init_profiler", "PATH", _named(activities))
        self._path, self._activities, self._ranges = path, set(activities), []

    def warmup(self, config: Config, activities: set[Activity]) -> None:
        self.note("_warmup_profiler", config, _named(activities))

    def start(self, config: Config, activities: set[Activity]) -> None:
        self.note("_start_profiler", config, _named(activities))
        self._config, self._recording = config, True

    def join(self, config: Config) -> None:
        self.note("_enable_profiler_in_child_thread", config)
        self._here.joined = True

    def stop(self) -> None:
        self.note("_stop_profiler")
        self._here.joined = False
        if self._recording and Activity.CPU in self._activities:
            framework = Path(self._path, "FRAMEWORK")
            framework.mkdir(exist_ok=True)
            (framework / "torch.op_range").write_bytes(b"operators")
        self._recording = False

    def thread_is_recorded(self) -> bool:
        """Return whether the calling thread is recorded, as `torch._C._autograd._profiler_enabled` does."""
        return getattr(self._here, "joined", False)

    def finalize(self) -> None:
        self.note("_finalize_profiler")
        if Activity.NPU in self._activities and not self.no_prof:
            host = Path(self._path, "PROF_000001_20260101000000000_STANDIN", "host")
            host.mkdir(parents=True)
            (host / "ranges.json").write_text(json.dumps(self._ranges))
        self._open.clear()

    # torch_npu._C._mstx

    def range_start(self, message: str, domain: str = "default") -> int:
        self.note("_range_start_on_host", message, domain)
        if not self._records(domain):
            return 0
        number = next(self._numbers)
        self._open[number] = (message, time.time_ns())
        return number

    def range_end(self, number: int, domain: str = "default") -> None:
        self.note("_range_end", "0" if number == 0 else "N", domain)
        message, began = self._open.pop(number, (None, 0))
        if message is not None and self._recording:
            self._ranges.append({"message": message, "start_ns": began, "end_ns": time.time_ns()})

    def _records(self, domain: str) -> bool:
        if not self._recording or self._config is None or Activity.NPU not in self._activities:
            return False
        asked = self._config.experimental.arguments
        include, exclude = asked.get("mstx_domain_include"), asked.get("mstx_domain_exclude", [])
        return bool(asked["msprof_tx"]) and (domain in include if include else domain not in exclude)


def _named(activities: set[Activity]) -> str:
    return "+".join(sorted(activity.name for activity in activities))


def install(wheel: Path) -> Compiled:
    """Make `import torch_npu` load the wheel's code, and return the stand-in. Call this once per process."""
    import torch

    package = wheel / "torch_npu"
    version = re.search(r"__version__ = '([^']+)'", (package / "version.py").read_text())
    assert version is not None
    compiled = Compiled()
    top = _module("torch_npu", package, __version__=version[1])
    top._C = _module("torch_npu._C", _mark=lambda *_: None)
    top._C._profiler = _profiler_module(compiled)
    top._C._mstx = _mstx_module(compiled)
    top.npu = torch.npu = _npu_module(compiled, package)  # type: ignore[attr-defined]  # torch_npu does so
    top.utils = _module("torch_npu.utils", package / "utils")
    enabled = torch._C._autograd._profiler_enabled
    torch._C._autograd._profiler_enabled = lambda: enabled() or compiled.thread_is_recorded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the wheel: escape sequences, deprecated names of torch
        _import(top)
    return compiled


def _import(top: Any) -> None:
    real = importlib.import_module("torch_npu.utils.utils")
    for name in ("should_print_warning", "_should_print_warning"):
        if hasattr(real, name):
            setattr(top.utils, name, getattr(real, name))
    top.npu.mstx = importlib.import_module("torch_npu.npu.mstx").mstx
    top.profiler = importlib.import_module("torch_npu.profiler")


def _module(name: str, path: Path | None = None, /, **names: Any) -> Any:
    made: Any = ModuleType(name)
    vars(made).update(names)
    made.__spec__ = ModuleSpec(name, None)
    if path is not None:
        made.__path__, made.__package__ = [str(path)], name
    sys.modules[name] = made
    return made


def _profiler_module(compiled: Compiled) -> Any:
    return _module(
        "torch_npu._C._profiler",
        ProfilerActivity=Activity,
        _ExperimentalConfig=ExperimentalConfig,
        NpuProfilerConfig=Config,
        _init_profiler=compiled.init,
        _warmup_profiler=compiled.warmup,
        _start_profiler=compiled.start,
        _stop_profiler=compiled.stop,
        _finalize_profiler=compiled.finalize,
        _get_freq=lambda: 100,
        _get_syscnt=lambda: 0,
        _get_syscnt_enable=lambda: False,
        _get_monotonic=lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW),
        _get_host_uid=lambda: 1,
        _supported_npu_activities=lambda: set(Activity),
        _enable_profiler_in_child_thread=compiled.join,
        _disable_profiler_in_child_thread=_noted(compiled, "_disable_profiler_in_child_thread"),
    )


def _mstx_module(compiled: Compiled) -> Any:
    others = ("_mark", "_mark_on_host", "_range_start", "_range_push", "_range_push_on_host", "_range_pop")
    made = _module(
        "torch_npu._C._mstx",
        _range_start_on_host=compiled.range_start,
        _range_end=compiled.range_end,
    )
    vars(made).update({name: _noted(compiled, name, 0) for name in others})
    return made


def _npu_module(compiled: Compiled, package: Path) -> Any:
    class Stream:
        stream_id = device_index = npu_stream = 0
        device_type = 20

    class Event:
        def record(self, *_: object) -> None: ...

        wait = query = elapsed_time = synchronize = record

    def set_device(device: int) -> None:
        compiled.note("set_device", device)

    npu = _module(
        "torch_npu.npu",
        package / "npu",
        _lazy_init=_noted(compiled, "_lazy_init"),
        synchronize=_noted(compiled, "synchronize"),
        set_device=set_device,
        current_device=lambda: compiled.device,
        is_available=lambda: True,
        device_count=lambda: 2,
        current_stream=lambda *_: Stream(),
        Event=Event,
    )
    npu.streams = _module("torch_npu.npu.streams", Stream=Stream, Event=Event)
    return npu


def _noted(compiled: Compiled, name: str, result: object = None) -> Callable[..., object]:
    def call(*_: object) -> object:
        compiled.note(name)
        return result

    return call
