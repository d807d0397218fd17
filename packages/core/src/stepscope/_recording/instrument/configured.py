"""Application of the configuration's `instrument` list to this process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope._recording.instrument import frameworks, patch
from stepscope._recording.instrument.call_arguments import Condition
from stepscope._recording.instrument.calls import Timing
from stepscope._recording.instrument.patch import Instrument, parent_of, when_imported
from stepscope._recording.instrument.step_boundaries import Boundary, calls
from stepscope._recording.process import failures
from stepscope._recording.process.identity import installed_version, is_first
from stepscope.config import InstrumentConfig, ProfileConfig
from stepscope.config.presets import Preset, read_preset
from stepscope.errors import ConfigError, ours
from stepscope.files import switch
from stepscope.files.spans import CONSUME

if TYPE_CHECKING:
    from stepscope._recording.process.manifest_part import ManifestPart
    from stepscope.engines.protocol import EngineFactory


_config: ProfileConfig | None = None
"""Configuration for engines that this process will build, or None to leave engines unchanged. One writer:
`watch`."""
_watched: set[str] = set()
"""Adapters whose library is patched when it is imported. One writer: `watch`."""


def watch(config: ProfileConfig, adapters: Set[str]) -> None:
    """If `config` records engines, enable the profiler in the settings of engines of `adapters` that this
    process will build.
    """
    global _config
    match = config.role("rollout")
    _config = config if adapters and match is not None and match[1].engine.profiler else None
    fresh = adapters - _watched if _config is not None else set()
    for adapter in sorted(fresh):
        _watched.add(adapter)
        when_imported(adapter, partial(_library_imported, adapter))


def _library_imported(adapter: str, library: ModuleType) -> None:
    from stepscope.engines.protocol import installed, load_engine  # imported here: 15 ms

    try:
        factory = load_engine(adapter) if adapter in installed() else None
        if factory is not None and factory.builder:
            module, _, name = factory.builder.partition(":")
            when_imported(module, partial(_patch, factory, name))
    except ours() as error:  # the user's import must succeed
        failures.note(f"arming engines of {adapter!r}", error)


def _patch(factory: EngineFactory, name: str, module: ModuleType) -> None:
    try:
        parent, attribute = parent_of(module, name)
        setattr(parent, attribute, _armed(getattr(parent, attribute), factory))
    except ours() as error:  # the user's import must succeed
        failures.note(f"arming engines by {factory.builder}", error)


def _armed(build: Callable[..., Any], factory: EngineFactory) -> Callable[..., Any]:
    @functools.wraps(build)
    def armed(settings: Any, *args: Any, **kwargs: Any) -> Any:
        if _config is not None:
            try:
                factory.arm(_config, settings)
            except ours() as error:
                failures.note(f"arming an engine by {factory.builder}", error)
        return build(settings, *args, **kwargs)

    return armed


_applied: dict[str, Instrument] = {}
"""{`module:name`: handle} of the applied list. One writer: `apply`."""
_entries: tuple[InstrumentConfig, ...] = ()
"""The applied `instrument` list. One writer: `apply`."""
_integrations: set[str] = set()
"""Integrations that are imported, or will be when their framework is imported. One writer: `integrate`."""
_adapters: set[str] = set()
"""Adapters that the applied list names. One writer: `apply`."""


def apply(config: ProfileConfig, *, lenient: bool = False) -> None:
    """Instrument the functions that `config` lists, now or at their import, and restore functions of an
    earlier list.

    Args:
        lenient: True to log a wrong entry and not raise. Workers and the start of a program need this,
            because a package may not be on sys.path yet (see `note_absent`).

    Raises:
        ConfigError: An entry names a module, or a function of an imported module, that does not exist. A
            wrong entry of a preset is only logged.
    """
    if config.instrument != _entries:
        _apply(config, lenient)
    watch(config, _adapters)


def _apply(config: ProfileConfig, lenient: bool) -> None:
    global _entries, _adapters
    presets = _presets(config.instrument, lenient)
    wanted = {handle.target: handle for handle in _handles(config.instrument, presets)}
    frameworks.expect(presets, installed_version)
    integrate(presets)
    for key in [key for key in _applied if key not in wanted]:
        _applied.pop(key).remove()
    for key, handle in wanted.items():
        known = _applied.get(key)
        if known is not None and not patch.same(known, handle):
            _applied.pop(key).remove()
        try:
            _applied[key] = patch.place(handle, early=lenient)
        except ours() as error:
            if not (lenient or handle.origin):
                raise
            patch.note_failure(handle, error)
    _entries = config.instrument
    entries = [entry for _, entry in _flat(_entries, presets)]
    _adapters = {name for entry in entries for name in (*entry.engines, entry.adapter) if name is not None}


def integrate(presets: Iterable[Preset]) -> None:
    """Import the integration of each preset once its framework is imported. An error is logged."""
    for preset in presets:
        if preset.integration is not None and preset.integration not in _integrations and not switch.DISABLED:
            _integrations.add(preset.integration)
            package = preset.distribution.replace("-", "_")
            patch.when_imported(package, partial(_import_integration, preset.integration))


def _import_integration(name: str, framework: ModuleType) -> None:
    try:
        import_module(name)
    except ours() as error:  # the user's import must succeed
        failures.note(f"{name} in {framework.__name__}", error)


def note_absent() -> None:
    """Log each listed module that cannot be found. Called when the first step begins in this process."""
    for handle in _applied.values():
        if handle.installed or handle.module in sys.modules or handle.origin:
            continue
        try:
            patch.check_importable(handle.module)
        except ConfigError as error:
            patch.note_failure(handle, error)


def note_unreached() -> None:
    """Log listed functions whose module was not imported, or that begin or end steps but were not called.
    Called when the second step begins in this process.
    """
    unreached = [
        f"{_described(handle)} {_fate(handle)}"
        for handle in _applied.values()
        if not handle.origin and (_waits_here(handle) or _is_uncalled(handle))
    ]
    if unreached and is_first():
        failures.warn("stepscope: not reached by the second step: %s", "; ".join(unreached))


def _waits_here(handle: Instrument) -> bool:
    """Return whether the module of a function was never imported. Return False in a process with Ray, whose
    workers may import the module.
    """
    return not handle.installed and handle.module not in sys.modules and "ray" not in sys.modules


def _is_uncalled(handle: Instrument) -> bool:
    """Return whether a function that begins or ends steps had no call. Calls of other functions are not
    counted.
    """
    return handle.installed and handle.boundary is not None and calls[handle.target] == 0


def apply_to(instance: object) -> None:
    """Instrument the class of a running Ray actor, which is a copy that the driver sent."""
    for handle in _applied.values():
        try:
            handle.install_on(type(instance))
        except ours() as error:
            patch.note_failure(handle, error)


def timed() -> dict[str, tuple[str, ...]]:
    """Return {`module:name`: its `role/stage`s} of the functions that are recorded in this process."""
    return {
        handle.target: tuple(timing.label(handle.name) for timing in recorded)
        for handle in _applied.values()
        if handle.installed
        and (recorded := [timing for timing in handle.recorded if timing.kind != "engine"])
    }


def enter(part: ManifestPart) -> None:
    """Enter into the manifest part the functions that are recorded in this process, and the entries without
    effect.

    Entries of presets are not reported as lacking, because a preset lists functions of several versions of
    its framework.
    """
    part.update(instrumented=timed(), missed=dict(patch.missed))
    for entry in _entries:
        reason = patch.refusals.get(_target(entry))
        if entry.preset is None and reason is not None:
            part.lack(f"instrument {_target(entry)}", reason, kind="selection")
    for trainer, reason in frameworks.uncovered().items():
        part.skip(trainer, reason, kind="selection")


def boundaries() -> list[str]:
    """Return the reasons why no step began: a line for each function or preset that should have begun one."""
    fates = []
    elsewhere: set[str] = set()
    for entry in _entries:
        if entry.step not in (None, "end") and _target(entry) not in _applied:
            fates.append(f"{_target(entry)} (step: {entry.step}) could not be patched: see the log")
        elif entry.preset is not None:
            preset = read_preset(entry.preset, installed_version)
            if not _is_here(preset):
                fates.append(f"the preset {entry.preset!r}: the framework is not installed in {sys.prefix}")
                elsewhere.update(map(_target, preset.entries))
    begins = [
        f"{_described(handle)} {_fate(handle)}"
        for handle in _applied.values()
        if handle.boundary is not None
        and handle.boundary.entry.step != "end"
        and handle.target not in elsewhere
    ]
    return begins + fates


def _described(handle: Instrument) -> str:
    boundary = handle.boundary
    return handle.target if boundary is None else f"{handle.target} (step: {boundary.entry.step})"


def _fate(handle: Instrument) -> str:
    if handle.installed:
        count = calls[handle.target]
        fate = f"began no step in {count} calls" if count else "was not called"
        return f"was patched, and {fate} in this process"
    if handle.module in sys.modules:
        return "could not be patched: see the log"
    if handle.module == program():
        return "was not patched: that module is the program itself, which runs as `__main__`"
    absent = patch.absent_part(handle.module)
    return "was not patched: " + (
        "its module was never imported" if absent is None else f"there is no module {absent!r}"
    )


def program() -> str | None:
    """Return the name under which another module could import this process' main program, or None if the
    program is not in a file.
    """
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return str(main.__spec__.name)  # type: ignore[union-attr]  # python -m
    file = getattr(main, "__file__", None)
    return None if file is None else os.path.splitext(os.path.basename(file))[0]


def _handles(entries: Iterable[InstrumentConfig], presets: Sequence[Preset]) -> Iterator[Instrument]:
    """Yield a handle for each function. Its timings are in the order of the entries; timings of presets are
    last.
    """
    grouped: dict[str, tuple[str, list[InstrumentConfig]]] = {}
    for origin, entry in _flat(entries, presets):
        grouped.setdefault(_target(entry), (origin, []))[1].append(entry)
    kinds = {entry.step for _, group in grouped.values() for entry in group}
    for target, (origin, group) in grouped.items():
        module, _, name = target.partition(":")
        timings = [_timing(entry) for entry in group if entry.step is None]
        step = next((entry for entry in group if entry.step is not None), None)
        boundary = None if step is None else Boundary(step, counts="next" not in kinds)
        yield Instrument(module, name, timings, boundary, origin)


def _target(entry: InstrumentConfig) -> str:
    return f"{entry.module}:{entry.name}"


def _flat(
    entries: Iterable[InstrumentConfig], presets: Iterable[Preset]
) -> Iterator[tuple[str, InstrumentConfig]]:
    yield from (("", entry) for entry in entries if entry.preset is None)
    for preset in presets:
        yield from ((_origin(preset), entry) for entry in preset.entries)


def _presets(entries: Iterable[InstrumentConfig], lenient: bool) -> list[Preset]:
    presets = [read_preset(entry.preset, installed_version) for entry in entries if entry.preset is not None]
    for preset in presets:
        if not (lenient or _is_here(preset)):
            allowed = f"a framework that is installed in {sys.prefix}"
            fix = f"pip install {preset.distribution}, or put its source on PYTHONPATH"
            raise ConfigError("instrument.preset", preset.name, allowed, fix)
    return presets


def _is_here(preset: Preset) -> bool:
    return patch.absent_part(preset.distribution.replace("-", "_")) is None


def _origin(preset: Preset) -> str:
    installed = installed_version(preset.distribution)
    here = f"{installed} is installed" if installed else "none is installed"
    return f" of the preset {preset.name!r}, written for {preset.distribution} {preset.tested} ({here} here)"


_NAMES: dict[str, tuple[str, str | None]] = {
    "trajectory": ("agent_loop", "trajectory"),
    "turn": ("agent_loop", "turn"),
    "tool": ("env", None),
    "weight_sync": ("trainer", "sync_weights"),
    "consume": ("*", CONSUME),
}
"""{kind: default (role, stage)}. A stage of None means the function's name."""


def _timing(entry: InstrumentConfig) -> Timing:
    role, stage = _NAMES.get(entry.kind, ("", None))
    return Timing(
        role=entry.role or role,
        stage=entry.stage or stage,
        attrs=dict(entry.attrs) or None,
        condition=Condition(entry.where, entry.same),
        kind=entry.kind,
        id=entry.id,
        policy_version=entry.policy_version,
        request=entry.request,
        turn=entry.index,
        tool=entry.tool,
        values=entry.values,
        engine=entry.engine,
        replica=entry.replica,
        adapter=entry.adapter,
    )
