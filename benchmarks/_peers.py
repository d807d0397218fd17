"""Decorators of other profilers (the peers), from their installed wheels. Absent peers are left out.

The `__init__` modules of verl and AReaL import whole training stacks. They are not run here. The profilers'
modules, and all that these import, are the wheels' own code.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

Decorator: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"


@dataclass
class Peer:
    decorate: Decorator
    attributes: dict[str, object] = field(default_factory=dict)
    """Attributes that the decorator needs on the object of the wrapped method."""
    finish: Callable[[int], object] = lambda spans: None
    """Writes out the recorded spans. The argument is their number since the last call."""


def available(loaders: dict[str, Callable[[], Peer]]) -> dict[str, Peer]:
    """Return the peers that load, and print why the others do not load."""
    peers = {}
    for name, load in loaders.items():
        try:
            peers[name] = load()
        except ImportError as error:
            print(f"not installed: {name} ({error})")
    return peers


def verl_disabled() -> Peer:
    """Return verl's `DistProfiler.annotate` on a worker whose profiler has `enable=False`, the default."""
    _enter("verl", "verl.utils", "verl.utils.profiler")
    config = importlib.import_module("verl.utils.profiler.config")
    profiler = importlib.import_module("verl.utils.profiler.profile").DistProfiler
    off = profiler(rank=0, config=config.ProfilerConfig(enable=False))
    return Peer(profiler.annotate(color="red", role="actor_update"), {"profiler": off})


def trl() -> Peer:
    """Return TRL's `profiling_decorator`, which has no switch, on a trainer without a reporter."""
    decorate = importlib.import_module("trl.extras.profiling").profiling_decorator
    trainer: dict[str, object] = {
        "state": SimpleNamespace(global_step=1),
        "args": SimpleNamespace(report_to=[]),
        "accelerator": SimpleNamespace(is_main_process=True),
    }
    return Peer(decorate, trainer)


def areal(*, enabled: bool) -> Peer:
    """Return AReaL's `trace_perf`. A stand-in replaces its configuration module, which needs CUDA kernels."""
    _enter("areal", "areal.utils", "areal.api")
    config = ModuleType("areal.api.cli_args")
    vars(config).update(PerfTracerConfig=object, SessionTracerConfig=object)
    sys.modules.setdefault("areal.api.cli_args", config)
    tracer = importlib.import_module("areal.utils.perf_tracer")
    if enabled:
        settings = SimpleNamespace(
            enabled=True, experiment_name="bench", trial_name="t", fileroot=tempfile.mkdtemp(prefix="areal-"),
            save_interval=1, profile_steps=None, session_tracer=None,
        )  # fmt: skip
        tracer.configure(settings, rank=0)
    return Peer(tracer.trace_perf("update", category="compute"), finish=lambda _: tracer.save(force=True))


def opentelemetry_off() -> Peer:
    """Return OpenTelemetry's API without an SDK, whose spans record nothing."""
    trace = importlib.import_module("opentelemetry.trace")
    return Peer(_in_span(trace.get_tracer("bench")))


def opentelemetry_sdk() -> Peer:
    """Return OpenTelemetry's SDK with its batching processor and its exporter that writes JSON lines."""
    sdk, export = (
        importlib.import_module("opentelemetry.sdk.trace"),
        importlib.import_module("opentelemetry.sdk.trace.export"),
    )
    out = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 # open until the process ends
    exporter = export.ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
    processor = export.BatchSpanProcessor(
        exporter, max_queue_size=1 << 20
    )  # the default of 2048 would drop most
    provider = sdk.TracerProvider()
    provider.add_span_processor(processor)
    return Peer(_in_span(provider.get_tracer("bench")), finish=lambda _: processor.force_flush(600_000))


def wrapt_off() -> Peer:
    """Return a wrapt decorator that checks a flag and calls the function."""
    wrapt = importlib.import_module("wrapt")

    @wrapt.decorator  # type: ignore[untyped-decorator] # loaded by name
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not ON:
            return wrapped(*args, **kwargs)
        raise AssertionError("never on")

    return Peer(wrapper)


ON = False


def record_function() -> Peer:
    """Return a decorator with torch's `record_function`."""
    torch_profiler = importlib.import_module("torch.profiler")

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with torch_profiler.record_function("update"):
                return fn(*args, **kwargs)

        return wrapper

    return Peer(decorate)


class Record:
    __slots__ = ("end_ns", "name", "start_ns")

    name: str
    start_ns: int
    end_ns: int


def least(pending: deque[Record], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the cheapest record of each call that Python allows."""
    current: ContextVar[Record] = ContextVar("current")
    enter, leave, append, now = current.set, current.reset, pending.append, time.monotonic_ns

    def inner(batch: int) -> Any:
        record = Record()
        record.name = "update"
        token = enter(record)
        record.start_ns = now()
        result = fn(batch)
        record.end_ns = now()
        leave(token)
        append(record)
        return result

    return inner


def _in_span(tracer: Any) -> Decorator:
    decorate: Decorator = tracer.start_as_current_span("update")
    return decorate


def _enter(*packages: str) -> None:
    """Make packages importable without running their `__init__`."""
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, _ = name.rpartition(".")
        spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
