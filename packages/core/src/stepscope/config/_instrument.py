"""Entries of `instrument`: functions that are timed in code that one cannot edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import msgspec

from stepscope.config._section import Mistakes, Section, build, items_of
from stepscope.config._words import closest
from stepscope.errors import ConfigError

Scalar: TypeAlias = str | int | float | bool | None
StepBoundary: TypeAlias = Literal["around", "begin", "end", "next"]

PATH = re.compile(r"[^\W\d]\w*(\.\w+)*")
"""A value that a call leads to: `self.state.global_step`, `batch.step`."""
_NUMBER = re.compile(rf"{PATH.pattern}(\+\d+)?")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


FRAMEWORKS = Path(__file__).parent / "frameworks"
"""A file of entries for each preset."""


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(sorted(path.stem for path in FRAMEWORKS.glob("*.yaml")))


class InstrumentConfig(Section, frozen=True, kw_only=True):
    """One function of somebody else's code, or the name of a preset that lists those of a framework."""

    _at: ClassVar[str] = "instrument"

    preset: str | None = None
    """A framework whose functions are known: `trl`, `verl`... Alone in its entry."""
    module: str | None = None
    """Dotted name of the module. It is not imported for this."""
    name: str | None = None
    """Dotted path of the function in it: `Class.method`."""
    role: str | None = None
    """Role that does the work. With `step`, the role of the process (`trainer` by default)."""
    stage: str | None = None
    """Name of the work; the function's name by default."""
    attrs: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Attributes of each span."""
    where: dict[str, Scalar] = msgspec.field(default_factory=dict)
    """Only calls in which these are equal: {argument, or a path from it: value}."""
    same: dict[str, str] = msgspec.field(default_factory=dict)
    """Only calls in which these are one object: {argument or path: argument or path}."""
    step: StepBoundary | None = None
    """The function's place in the loop's steps: `around`, `begin`, `end` or `next`."""
    number: str | None = None
    """With `step`: the path to the step's number, `+1` allowed; None counts from 0."""
    workers: dict[str, str] = msgspec.field(default_factory=dict)
    """With `step`: {role: path to its Ray actors}, recorded too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None:
            self._check_preset(self.preset)
        else:
            self._check_place()
            self._check_paths()

    def _check_preset(self, preset: str) -> None:
        beside = [field for field in self.__struct_fields__ if field != "preset" and getattr(self, field)]
        if beside:
            allowed = "nothing else in the entry of a preset"
            value = getattr(self, beside[0])
            raise ConfigError(f"instrument.{beside[0]}", value, allowed, "write an entry of its own")
        known = preset_names()
        if preset not in known:
            near = closest(preset, known)
            fix = f"did you mean {near!r}?" if near else "list its functions: {module, name, role, stage}"
            raise ConfigError("instrument.preset", preset, ", ".join(known), fix)

    def _check_place(self) -> None:
        for field in ("module", "name"):
            if not _DOTTED.fullmatch(getattr(self, field) or ""):
                fix = "write {module: package.module, name: Class.method, role: rollout}, or {preset: trl}"
                raise ConfigError(f"instrument.{field}", getattr(self, field), "a dotted name", fix)
        if self.module == "__main__":
            raise own_program(self.module)
        if self.step is None and not (self.role or "").strip():
            fix = "say who does the work (role: actor), or what it has to do with steps (step: around)"
            raise ConfigError("instrument.role", self.role, "text that is not empty", fix)
        if self.step is not None and (self.stage is not None or self.attrs):
            field = "attrs" if self.stage is None else "stage"
            fix = "give the function's span an entry of its own"
            raise ConfigError(f"instrument.{field}", getattr(self, field), "nothing beside `step`", fix)
        if self.step is None and (self.number is not None or self.workers):
            field = "workers" if self.number is None else "number"
            fix = "say what the function has to do with steps: step: around, begin, end or next"
            raise ConfigError(f"instrument.{field}", getattr(self, field), "nothing without `step`", fix)

    def _check_paths(self) -> None:
        paths = [
            *(("where", key) for key in self.where),
            *(("workers", path) for path in self.workers.values()),
        ]
        paths += [("same", path) for pair in self.same.items() for path in pair]
        for field, path in paths:
            if not PATH.fullmatch(path):
                fix = "write it like model or self.ref_model"
                raise ConfigError(f"instrument.{field}", path, "an argument, or a dotted path from one", fix)
        if self.number is not None and not _NUMBER.fullmatch(self.number):
            fix = "write it like self.state.global_step or step+1"
            raise ConfigError("instrument.number", self.number, "a dotted path from an argument", fix)


def own_program(module: str, file: str = "the program") -> ConfigError:
    """Return the error of an entry for the program's own module."""
    fix = "move the function into a module that the program imports, or mark it with profile_step"
    allowed = f"a module that the program imports; {file} runs as `__main__` and defines its functions later"
    return ConfigError("instrument.module", module, allowed, fix)


def parse_instrument(value: object, field: str) -> tuple[InstrumentConfig, ...]:
    """Return entries from mappings or names of presets. A text has commas, or is JSON of a list.

    Raises:
        ConfigError: anything else, a wrong entry, or one that means no call that an earlier one does not.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            fix = 'write [{"preset": "trl"}], or the names of presets with commas between them'
            raise ConfigError(field, value, "JSON of a list", fix) from None
    items = items_of(value)
    if items is None:
        fix = "write [{preset: trl}] or [{module: ..., name: ..., role: ...}]"
        raise ConfigError(field, value, "a list of functions and presets", fix)
    entries: list[InstrumentConfig] = []
    mistakes = Mistakes()
    for item in items:
        with mistakes.noted():
            entries.append(_entry(item, field))
    mistakes.raise_any()
    for at, entry in enumerate(entries):
        if any(_hidden(entry, earlier) for earlier in entries[:at]):
            target = entry.preset or f"{entry.module}:{entry.name}"
            fix = "take one out, or tell the calls apart with `where` or `same` in the first"
            raise ConfigError(field, target, "entries that each mean other calls", fix)
    return tuple(entries)


def _hidden(entry: InstrumentConfig, earlier: InstrumentConfig) -> bool:
    """Return whether `earlier` takes all calls that `entry` means."""
    if entry == earlier:
        return True
    one, other = (earlier.module, earlier.name), (entry.module, entry.name)
    if entry.preset is not None or one != other or (entry.step is None) != (earlier.step is None):
        return False
    return earlier.step is not None or not (earlier.where or earlier.same)


def _entry(item: object, field: str) -> InstrumentConfig:
    if isinstance(item, InstrumentConfig):
        return item
    if isinstance(item, str):
        return InstrumentConfig(preset=item)
    if not isinstance(item, Mapping):
        fix = "write {preset: trl} or {module: ..., name: ..., role: ...}"
        raise ConfigError(field, item, "entries that are mappings, or names of presets", fix)
    return build(InstrumentConfig, item, field)
