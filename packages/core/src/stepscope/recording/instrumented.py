"""The configuration's `instrument` list, put into effect in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from stepscope.config import InstrumentConfig, ProfileConfig
from stepscope.config.presets import Preset, read_preset
from stepscope.errors import ConfigError
from stepscope.recording import guard, patch
from stepscope.recording.boundaries import Boundary, calls_of
from stepscope.recording.calls import Condition
from stepscope.recording.patch import Instrument, Timing

_applied: dict[tuple[str, str], Instrument] = {}
"""What stands here because of a configuration. One writer: `apply`."""
_entries: tuple[InstrumentConfig, ...] = ()
"""The list that it stands for. One writer: `apply`."""


def apply(config: ProfileConfig, *, lenient: bool = False) -> None:
    """Instruments what `config` lists, now or at its import, and takes back what another one had listed.

    Args:
        lenient: Log what is wrong with an entry instead of raising it: in workers, and at a program's start.

    Raises:
        ConfigError: an entry names a module, or a function of an imported module, that is not there. What
            does not fit in a preset is logged, and the rest of it is used.
    """
    global _entries
    if config.instrument == _entries:
        return
    wanted = {(handle.module, handle.name): handle for handle in _handles(config.instrument, lenient)}
    for key in [key for key in _applied if key not in wanted]:
        _applied.pop(key).remove()
    for key, handle in wanted.items():
        known = _applied.get(key)
        if known is not None and not patch.same(known, handle):
            _applied.pop(key).remove()
        try:
            _applied[key] = patch.place(handle)
        except Exception as error:
            if not (lenient or handle.origin):
                raise
            _note(handle, error)
    _entries = config.instrument


def apply_to(instance: object) -> None:
    """Instruments the class of a live Ray actor, which Ray built from what the driver sent."""
    for handle in _applied.values():
        try:
            handle.install_on(type(instance))
        except Exception as error:
            _note(handle, error)


def timed() -> dict[str, tuple[str, ...]]:
    """Functions that are replaced in this process and timed: {`module:name`: what calls are recorded as}."""
    return {
        f"{handle.module}:{handle.name}": tuple(
            f"{timing.role}/{timing.stage or handle.name.rpartition('.')[2]}" for timing in handle.timings
        )
        for handle in _applied.values()
        if handle.installed and handle.timings
    }


def boundaries() -> list[str]:
    """Each function that was to begin a step, and what became of it in this process."""
    begins = [
        handle
        for handle in _applied.values()
        if handle.boundary is not None and handle.boundary.kind != "end"
    ]
    said = [f"{handle.module}:{handle.name} (step: {_kind(handle)}) {_fate(handle)}" for handle in begins]
    listed = {(handle.module, handle.name) for handle in _applied.values()}
    for entry in _entries:
        if entry.step not in (None, "end") and (entry.module, entry.name) not in listed:
            said.append(f"{entry.module}:{entry.name} (step: {entry.step}) could not be patched: see the log")
        elif entry.preset is not None and not _is_here(read_preset(entry.preset, _installed)):
            said.append(f"the preset {entry.preset!r}: the framework is not installed in {sys.prefix}")
    return said


def _kind(handle: Instrument) -> str:
    return "" if handle.boundary is None else handle.boundary.kind


def _fate(handle: Instrument) -> str:
    calls = calls_of(f"{handle.module}:{handle.name}")
    if handle.installed:
        return f"was patched, and {f'began no step in {calls} calls' if calls else 'was never called'}"
    if handle.module in sys.modules:
        return "could not be patched: see the log"
    return "was not patched: its module was never imported"


def _note(handle: Instrument, error: Exception) -> None:
    """Logs it, once per module where that is not there."""
    whole = isinstance(error, ConfigError) and error.value == handle.module
    target = repr(handle.module) if whole else f"{handle.module!r}, {handle.name!r}"
    guard.note(f"instrument({target}){handle.origin}", error)


def _handles(entries: Iterable[InstrumentConfig], lenient: bool) -> Iterator[Instrument]:
    """One per function. Entries that stand before others of the same function come first, own ones before
    those of presets.
    """
    grouped: dict[tuple[str, str], tuple[str, list[InstrumentConfig]]] = {}
    for origin, entry in _flat(entries, lenient):
        key = (str(entry.module), str(entry.name))
        grouped.setdefault(key, (origin, []))[1].append(entry)
    for (module, name), (origin, group) in grouped.items():
        timings = [_timing(entry) for entry in group if entry.step is None]
        boundary = next((_boundary(entry) for entry in group if entry.step is not None), None)
        yield Instrument(module, name, timings, boundary, origin)


def _flat(entries: Iterable[InstrumentConfig], lenient: bool) -> Iterator[tuple[str, InstrumentConfig]]:
    presets = []
    for entry in entries:
        if entry.preset is None:
            yield "", entry
        else:
            presets.append(entry.preset)
    for name in presets:
        preset = read_preset(name, _installed)
        if not (lenient or _is_here(preset)):
            allowed = f"a framework that is installed in {sys.prefix}"
            fix = f"pip install {preset.distribution}, or put its source on PYTHONPATH"
            raise ConfigError("instrument.preset", name, allowed, fix)
        origin = _origin(preset)
        if _is_here(preset):  # a helper process of another environment has nothing to patch
            yield from ((origin, entry) for entry in preset.entries)


def _is_here(preset: Preset) -> bool:
    return patch.absent_part(preset.distribution.replace("-", "_")) is None


def _origin(preset: Preset) -> str:
    installed = _installed(preset.distribution)
    here = f"{installed} is installed" if installed else "none is installed"
    return f" of the preset {preset.name!r}, written for {preset.distribution} {preset.tested} ({here} here),"


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _timing(entry: InstrumentConfig) -> Timing:
    return Timing(str(entry.role), entry.stage, dict(entry.attrs) or None, Condition(entry.where, entry.same))


def _boundary(entry: InstrumentConfig) -> Boundary:
    return Boundary(
        kind=str(entry.step),
        role=entry.role or "trainer",
        number=entry.number,
        workers=dict(entry.workers),
        condition=Condition(entry.where, entry.same),
    )
