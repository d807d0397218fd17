"""An `NpuConfig`, resolved for the installed torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepscope.config import NpuConfig
from stepscope.errors import BackendError
from stepscope_npu._versions import SOURCE_CANN, TorchNpu

Recorded: TypeAlias = dict[str, str | int | float | bool | None]

_LEVELS = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}
_FLAGS = {
    "memory": "profile_memory",
    "shapes": "record_shapes",
    "module": "with_modules",
    "stack": "with_stack",
}
"""{entry of `npu.contents`: argument of `torch_npu.profiler.profile` that turns it on}."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A configuration, resolved for one torch_npu."""

    torch_npu: TorchNpu
    make_profile: Callable[..., Any]
    """Makes a `torch_npu.profiler.profile` without `schedule` and `on_trace_ready`. The call makes the NPU
    context, so call it after the device is set."""
    flags: Mapping[str, bool]
    """Arguments of `profile` for the details of each operator."""
    records_device: bool
    records_operators: bool
    markers: bool
    ignored: dict[str, str]
    recorded: Recorded


def resolve(config: NpuConfig, torch_npu: TorchNpu) -> Options:
    """Resolve a configuration.

    Raises:
        BackendError: this torch_npu lacks a feature that the run needs.
    """
    ignored: dict[str, str] = {}
    contents = list(config.contents)
    if config.markers and "npu" not in contents:
        contents.insert(0, "npu")
        ignored["npu.contents"] = "npu is recorded as well: without it torch_npu drops the markers of spans"
    activities = [
        getattr(torch_npu.profiler.ProfilerActivity, name.upper())
        for name in ("cpu", "npu")
        if name in contents
    ] or [torch_npu.profiler.ProfilerActivity.CPU]
    if config.export == "db" and "npu" in contents:
        _refuse_database(torch_npu)
    experimental = torch_npu.profiler._ExperimentalConfig(**_experimental(config, torch_npu, ignored))
    flags = {argument: name in contents for name, argument in _FLAGS.items()}

    def make_profile(**arguments: Any) -> Any:
        return torch_npu.profiler.profile(
            activities=activities, experimental_config=experimental, **flags, **arguments
        )

    return Options(
        torch_npu=torch_npu,
        make_profile=make_profile,
        flags=flags,
        records_device="npu" in contents,
        records_operators="cpu" in contents,
        markers=config.markers,
        ignored=ignored,
        recorded=_recorded(config, contents),
    )


def _refuse_database(torch_npu: TorchNpu) -> None:
    """Raise `BackendError` before the run if this torch_npu would refuse the export `db`.

    The oldest versions check CANN's msprof for `db`, and make no profile if msprof is absent or does not
    support `db`.
    """
    manager = getattr(torch_npu.interface, "CannPackageManager", None)
    ask = getattr(manager, "cann_package_support_export_db", None)
    if ask is None:
        return
    try:
        why = None if ask() else "this CANN does not know it"
    except RuntimeError as error:
        why = str(error)
    if why is not None:
        raise BackendError(
            f"torch_npu {torch_npu.version} refuses npu.export db: {why}. "
            f"Fix: put CANN's msprof on PATH ({SOURCE_CANN}), or npu.export: text"
        )


def _experimental(config: NpuConfig, torch_npu: TorchNpu, ignored: dict[str, str]) -> dict[str, Any]:
    """Return {argument: value} for the `_ExperimentalConfig` of this torch_npu. Raise `BackendError` if it
    lacks an argument of `npu.extra`.
    """
    mstx = "mstx" if "mstx" in torch_npu.arguments else "msprof_tx"
    arguments: dict[str, Any] = {
        "profiler_level": torch_npu.choices("ProfilerLevel")[_LEVELS[config.level]],
        "aic_metrics": _aic_metrics(config, torch_npu),
        "l2_cache": config.l2_cache,
        mstx: config.markers,
        "data_simplification": config.data_simplification,
        "export_type": torch_npu.choices("ExportType")["Db" if config.export == "db" else "Text"],
        **_domains(config, torch_npu, ignored),
    }
    known = torch_npu.arguments - arguments.keys()
    for name in config.extra:
        if name not in known:
            raise BackendError(
                f"npu.extra names {name!r}, but the _ExperimentalConfig of torch_npu {torch_npu.version} "
                f"takes {', '.join(sorted(known))}. Fix: remove it, or install a torch_npu that has it"
            )
    return {**arguments, **config.extra}


def _aic_metrics(config: NpuConfig, torch_npu: TorchNpu) -> Any:
    known = torch_npu.choices("AiCMetrics")
    name = config.aic_metrics or "AiCoreNone"
    if name not in known:
        raise BackendError(
            f"npu.aic_metrics is {name!r}, but torch_npu {torch_npu.version} has {', '.join(sorted(known))}. "
            "Fix: choose one of these"
        )
    return known[name]


def _domains(config: NpuConfig, torch_npu: TorchNpu, ignored: dict[str, str]) -> dict[str, list[str]]:
    """Return the arguments for mstx domains. `default` is always included: it has the markers of spans."""
    if not config.markers:
        return {}
    if config.domains_include:
        name, values = "include", [*dict.fromkeys((*config.domains_include, "default"))]
    else:
        name, values = "exclude", list(config.domains_exclude)
    if not values:
        return {}
    argument = f"mstx_domain_{name}"
    if argument not in torch_npu.arguments:
        ignored[f"npu.domains_{name}"] = f"torch_npu {torch_npu.version} has no {argument}: all are recorded"
        return {}
    return {argument: values}


def _recorded(config: NpuConfig, contents: Sequence[str]) -> Recorded:
    """Return the options that the sidecar shows."""
    extra = {f"extra.{name}": value for name, value in config.extra.items()}
    return {
        "level": config.level,
        "contents": ",".join(contents),
        "aic_metrics": config.aic_metrics,
        "l2_cache": config.l2_cache,
        "export": config.export,
        "markers": config.markers,
        "patched_by_torch_npu": ",".join(patched_by_torch_npu()) or None,
        **{name: ",".join(value) if isinstance(value, list) else value for name, value in extra.items()},
    }


def patched_by_torch_npu() -> list[str]:
    """Return the names of torch's functions that the import of torch_npu has replaced; empty if there are
    none.

    They write the mstx ranges `dataloader` and `save_checkpoint` into every recording, in the default domain.
    """
    import torch
    from torch.utils.data import DataLoader

    hooked: Mapping[str, object] = {
        "DataLoader.__iter__": DataLoader.__iter__,
        "torch.serialization.save": torch.serialization.save,
    }
    return [name for name, function in hooked.items() if _is_theirs(function)]


def _is_theirs(function: object) -> bool:
    # torch_npu's `save` uses functools.wraps, so that `__module__` is torch's. The code shows the real file.
    code = getattr(function, "__code__", None)
    return code is not None and "_add_mstx_patch" in code.co_filename
