"""Versions of SGLang, and the options of its profiler. This is the only module that compares versions.

The versions were found in the wheels of 0.5.3 to 0.5.23; `tests/test_wheels.py` checks them.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple, cast

from stepscope.engines.supported import expect_supported, numbers, supported_by
from stepscope.errors import EngineError

ADAPTER = "stepscope-rollout-sglang"
"""The distribution whose `engine` extra states the supported range."""

SINCE = {
    "output_dir": "0.5.3",
    "start_step": "0.5.3",
    "num_steps": "0.5.3",
    "activities": "0.5.3",
    "with_stack": "0.5.3",
    "record_shapes": "0.5.3",
    "profile_by_stage": "0.5.3",
    "merge_profiles": "0.5.4",
    "profile_prefix": "0.5.6",
    "profile_stages": "0.5.6",
    "profile_id": "0.5.15",
    "detailed_annotations": "0.5.19",
}
"""{option of `start_profile`: the first version that has the option}."""

XPU_SINCE = "0.5.10"
PLUGINS_SINCE = "0.5.11"
"""First version whose schedulers load the entry points `sglang.srt.plugins`."""
STEPS_NAMED_SINCE = "0.5.11"
"""First version whose traces name forward passes: `step[EXTEND ...]`, `step[DECODE ...]`."""
SCOPED_BATCHES_SINCE = "0.5.14"
"""First version in which `run_batch` is a `record_function`. The profiles of stages end and begin inside
`run_batch`."""
DP_ATTENTION_SINCE = "0.5.10"
"""First version whose profiler starts under DP attention. In older versions, a start reaches only one of
several schedulers, and the caller gets no answer."""
DECODE_SERVER_BY_STAGE_SINCE = "0.5.21"
"""First version in which a decode server survives captures by stage. In older versions, its placeholder
batches kill the scheduler."""
MANY_CAPTURES = ("0.5.13", "0.5.17")
"""First and last version in which the fifth to fourteenth capture killed the scheduler (with torch 2.13)."""


class Dialect(NamedTuple):
    """The form of the call that starts the profiler of one TokenizerManager."""

    as_object: bool
    """True if `start_profile` accepts a `ProfileReq` (0.5.15 and later), False if it accepts keywords."""
    options: frozenset[str]


def older(version: str | None, than: str) -> bool:
    """Return whether `version` is below `than`. False for an unknown version."""
    return version is not None and bool(numbers(version)) and numbers(version) < numbers(than)


def may_crash_soon(version: str | None) -> bool:
    """Return whether a version is one of `MANY_CAPTURES`."""
    first, last = map(numbers, MANY_CAPTURES)
    return version is not None and first <= numbers(version) <= last


def installed() -> str | None:
    """Return the version of the sglang in this process, or None if it is not installed as a distribution."""
    module = sys.modules.get("sglang")
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def check(version: str | None) -> None:
    """Warn of an SGLang version above the supported range.

    Raises:
        EngineError: the version is below the range.
    """
    expect_supported(supported_by(ADAPTER), version)


def dialect_of(start_profile: Callable[..., object]) -> Dialect:
    """Return the dialect that the signature of `TokenizerManager.start_profile` shows.

    Raises:
        EngineError: the signature is unknown.
    """
    names = frozenset(inspect.signature(start_profile).parameters)
    if "req" in names:
        return Dialect(True, fields_of(profile_request()))
    if {"output_dir", "num_steps"} <= names:
        return Dialect(False, names)
    raise EngineError(
        f"TokenizerManager.start_profile{inspect.signature(start_profile)} is neither of the two forms that "
        f"are known (sglang {installed()}; the adapter supports {supported_by(ADAPTER)})"
    )


def profile_request() -> Callable[..., object]:
    """Return the class `ProfileReq` of the sglang in this process."""
    import importlib

    module = importlib.import_module("sglang.srt.managers.io_struct")  # imported by each TokenizerManager
    return cast(Callable[..., object], module.ProfileReq)


def fields_of(kind: object) -> frozenset[str]:
    """Return the fields of a msgspec struct or a dataclass."""
    names = getattr(kind, "__struct_fields__", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(cast(type, kind))]
    return frozenset(names)


def options_of(version: str | None) -> frozenset[str]:
    """Return the options of `start_profile` in a version, according to `SINCE`. Used for servers, because a
    server does not show its options.
    """
    return frozenset(option for option, since in SINCE.items() if not older(version, since))
