"""Entries of `instrument`: functions that are recorded without an edit of their source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import msgspec

from stepscope.config._fields import Mistakes, Parser, Section, build, closest, either, items_of
from stepscope.errors import ConfigError

Scalar: TypeAlias = str | int | float | bool | None
StepBoundary: TypeAlias = Literal["around", "begin", "end", "next"]
Kind: TypeAlias = Literal["span", "trajectory", "turn", "tool", "weight_sync", "consume", "engine"]

PATH = re.compile(r"[^\W\d]\w*(\.\w+)*")
"""A path to a value that begins with an argument of the call: `self.state.global_step`, `batch.step`."""
RESULT = "result"
"""The first part of a path that begins with the result of the call."""
_NUMBER = re.compile(rf"{PATH.pattern}(\+\d+)?")
_READING = re.compile(rf"({PATH.pattern}|len\({PATH.pattern}\))([+-]\d+)?")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""A path in braces within a text: `{uid}_{attempt}`."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


_BY_KIND: dict[str, tuple[str, ...]] = {
    "span": ("role", "stage", "attrs", "values", "policy_version", "request"),
    "trajectory": ("id", "attrs", "values", "policy_version"),
    "turn": ("index", "attrs", "values", "policy_version", "request"),
    "tool": ("tool", "stage", "attrs", "values"),
    "weight_sync": ("role", "stage", "attrs", "values", "policy_version"),
    "consume": ("id", "policy_version"),
    "engine": ("adapter", "engine", "replica"),
}
"""{kind: the fields that an entry of that kind may have}."""
_OF_KINDS = tuple(dict.fromkeys(field for fields in _BY_KIND.values() for field in fields))
_OF_STEPS = ("number", "workers", "engines")
_REQUIRED = {"span": ("role",), "consume": ("id",), "engine": ("adapter", "engine")}
_EARLY = {
    "span": ("policy_version",),
    "trajectory": ("id",),
    "turn": ("index",),
    "tool": ("tool",),
    "weight_sync": ("policy_version",),
}
"""{kind: the fields whose paths are read before the call, so that they cannot begin with the result}."""
LAYERS = {"tool": "span", "weight_sync": "span"}
"""{kind: other kind whose entries would record the same span}. The check for two entries of one function
treats both kinds as one."""

FRAMEWORKS = Path(__file__).parent / "frameworks"
"""The folder of the presets, a YAML file each."""


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(sorted(path.stem for path in FRAMEWORKS.glob("*.yaml")))


def parse_paths(value: object, field: str) -> tuple[str, ...]:
    """Return the paths in a list, or in a text that is a single path."""
    if value is None:
        return ()
    paths = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(path, str) for path in paths):
        fix = "write id: kwargs.uid, or id: [kwargs.uid, kwargs.attempt]"
        raise ConfigError(field, value, "a path, or a list of paths", fix)
    return paths


class InstrumentConfig(Section, frozen=True, kw_only=True):
    """One function to record without an edit of its source, or the name of a preset, which lists a
    framework's functions.
    """

    _at: ClassVar[str] = "instrument"
    _parsers: ClassVar[Mapping[str, Parser]] = {"id": parse_paths}

    preset: str | None = None
    """Name of a preset: `trl`, `verl`... Then no other field may be set."""
    module: str | None = None
    """Dotted name of the module that defines the function. The entry does not import the module."""
    name: str | None = None
    """Dotted path of the function in the module: `Class.method`."""
    kind: Kind = "span"
    """Meaning of a call of the function: `span`, `trajectory`, `turn`, `tool`, `weight_sync`, `consume` or
    `engine`."""
    role: str | None = None
    """Role of the spans. With `step`: the role of the process, `trainer` by default."""
    stage: str | None = None
    """Stage of the spans; the function's name by default."""
    attrs: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Constant attributes of each span."""
    values: dict[str, str] = msgspec.field(default_factory=dict)
    """Attributes whose values are read from each call: {name: path}. Numbers and booleans only."""
    id: tuple[str, ...] = ()
    """Path to the trajectory's id. The values of several paths are joined by `/`. With `consume`: paths to
    ids, or to lists of ids."""
    policy_version: str | None = None
    """Path to the version of the weights."""
    request: str | None = None
    """Path to the call's request id in the inference engine. The id joins the call to the forward passes that
    served it."""
    index: str | None = None
    """Path to the number of the turn. If null, turns are counted from 0 within their trajectory."""
    tool: str | None = None
    """Path to the name of a tool."""
    adapter: str | None = None
    """Name of an engine's adapter (`vllm`)."""
    engine: str | None = None
    """Path to an engine or to a list of engines, read after the call has returned; or the URL of a server,
    which may contain paths: `http://{self.host}:{self.port}`."""
    replica: str | None = None
    """Path to the number of the engine's replica."""
    where: dict[str, Scalar] = msgspec.field(default_factory=dict)
    """Record only calls in which each path has the given value: {path: value}."""
    same: dict[str, str] = msgspec.field(default_factory=dict)
    """Record only calls in which both paths lead to the same object: {path: path}."""
    step: StepBoundary | None = None
    """Effect of a call on the training's steps: the call is the step (`around`), begins a step (`begin`),
    ends the step (`end`), or ends the step and begins the next (`next`). If null, no effect."""
    number: str | None = None
    """With `step`: path to the step's number, to which `+1` may be added. If null, steps are counted from
    0."""
    workers: dict[str, str] = msgspec.field(default_factory=dict)
    """With `step`: Ray actors to record in each captured step: {role: path to the role's actors}."""
    engines: dict[str, str] = msgspec.field(default_factory=dict)
    """With `step`: engines to record in each captured step: {adapter: path}. The path leads to engines, URLs
    of servers, or Ray actors that contain an engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None:
            self._check_preset(self.preset)
        else:
            self._check_place()
            (self._check_kind if self.step is None else self._check_step)()
            self._check_paths()

    def _check_preset(self, preset: str) -> None:
        beside = [name for name in self.__struct_fields__ if name != "preset" and self._is_given(name)]
        if beside:
            allowed = "nothing else in the entry of a preset"
            value = getattr(self, beside[0])
            raise ConfigError(f"instrument.{beside[0]}", value, allowed, "write an entry of its own")
        known = preset_names()
        if preset not in known:
            near = closest(preset, known)
            fix = f"did you mean {near!r}?" if near else "list its functions: {module, name, role, stage}"
            raise ConfigError("instrument.preset", preset, ", ".join(known), fix)

    def _is_given(self, name: str) -> bool:
        return bool(getattr(self, name)) and not (name == "kind" and self.kind == "span")

    def _check_place(self) -> None:
        for field in ("module", "name"):
            if not _DOTTED.fullmatch(getattr(self, field) or ""):
                fix = "write {module: package.module, name: Class.method, role: rollout}, or {preset: trl}"
                raise ConfigError(f"instrument.{field}", getattr(self, field), "a dotted name", fix)
        if self.module == "__main__":
            raise own_program(self.module)

    def _check_step(self) -> None:
        for field in ("kind", *_OF_KINDS):
            if field != "role" and self._is_given(field):
                fix = f"give the function's {self.kind} an entry of its own"
                raise ConfigError(f"instrument.{field}", getattr(self, field), "nothing beside `step`", fix)

    def _check_kind(self) -> None:
        for field in (*_OF_STEPS, *_OF_KINDS):
            if field not in _BY_KIND[self.kind] and self._is_given(field):
                raise self._misplaced(field)
        for field in _REQUIRED.get(self.kind, ()):
            value = getattr(self, field)
            if not value or not str(value).strip():
                allowed = "text that is not empty" if field in ("role", "adapter") else "a path"
                raise ConfigError(f"instrument.{field}", value, allowed, _MISSING[field])

    def _misplaced(self, field: str) -> ConfigError:
        """Return the error for a field that this kind of entry does not have."""
        if field in _OF_STEPS:
            allowed, fix = "nothing without `step`", "say what the function has to do with steps: "
            fix += "step: around, begin, end or next"
        else:
            allowed = f"nothing beside `kind: {self.kind}`"
            kinds = [f"kind: {kind}" for kind, fields in _BY_KIND.items() if field in fields]
            fix = f"take it out, or write {either(kinds)}"
        return ConfigError(f"instrument.{field}", getattr(self, field), allowed, fix)

    def _check_paths(self) -> None:
        paths = [
            *(("where", key) for key in self.where),
            *(("same", path) for pair in self.same.items() for path in pair),
            *(("workers", path) for path in self.workers.values()),
            *(("engines", path) for path in self.engines.values()),
            *(("id", path) for text in self.id for path in paths_in(text)),
            *(("engine", path) for path in paths_in(self.engine or "") if path),
            ("tool", self.tool),
            ("request", self.request),
        ]
        _check_form(paths, PATH, "an argument, or a dotted path from one", "model or self.ref_model")
        readings = [
            *(("values", path) for path in self.values.values()),
            *((field, getattr(self, field)) for field in ("index", "policy_version", "replica")),
        ]
        _check_form(readings, _READING, "a dotted path, or the length of one", "self.step or len(result.ids)")
        number = [("number", self.number)]
        _check_form(number, _NUMBER, "a dotted path from an argument", "self.state.global_step or step+1")
        for field in _EARLY.get(self.kind, ()):
            value = getattr(self, field)
            texts = value if isinstance(value, tuple) else [value or ""]
            for path in (path for text in texts for path in paths_in(text)):
                if path.removeprefix("len(").split(".")[0] == RESULT:
                    fix = "begin it with an argument, or read the number into `values`"
                    raise ConfigError(f"instrument.{field}", path, "a path known before the call", fix)


_MISSING = {
    "role": "say who does the work (role: actor), or what it has to do with steps (step: around)",
    "id": "say where the ids of the consumed trajectories are: id: batch.uid",
    "adapter": "name the engine's adapter: adapter: vllm",
    "engine": "say where the engine is: engine: self.engine",
}


def paths_in(text: str) -> list[str]:
    """Return the paths in a text such as `{uid}_{attempt}`. A text without braces is one path."""
    return _PLACEHOLDER.findall(text) if "{" in text else [text]


def _check_form(
    paths: Iterable[tuple[str, str | None]], form: re.Pattern[str], allowed: str, example: str
) -> None:
    for field, path in paths:
        if path is not None and not form.fullmatch(path):
            raise ConfigError(f"instrument.{field}", path, allowed, f"write it like {example}")


def own_program(module: str, file: str = "the program") -> ConfigError:
    """Return the error for an entry that names the program's own module."""
    fix = "move the function into a module that the program imports, or mark it with profile_step"
    allowed = f"a module that the program imports; {file} runs as `__main__` and defines its functions later"
    return ConfigError("instrument.module", module, allowed, fix)


def parse_instrument(value: object, field: str) -> tuple[InstrumentConfig, ...]:
    """Return the entries of `value`: a list of mappings and names of presets, names in a text with commas, or
    the list as JSON text.

    Raises:
        ConfigError: `value` has another form, an entry is wrong, or an earlier entry already covers all calls
            of an entry.
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
    """Return whether `earlier` already covers all calls that `entry` covers."""
    if entry == earlier:
        return True
    if entry.preset is not None or _place(entry) != _place(earlier):
        return False
    return earlier.step is not None or not (earlier.where or earlier.same)


def _place(entry: InstrumentConfig) -> tuple[str | None, str | None, str]:
    """Return (module, name, layer) of an entry. Two entries with the same place would record the same
    calls as the same kind.
    """
    layer = "step" if entry.step is not None else LAYERS.get(entry.kind, entry.kind)
    return entry.module, entry.name, layer


def _entry(item: object, field: str) -> InstrumentConfig:
    if isinstance(item, InstrumentConfig):
        return item
    if isinstance(item, str):
        return InstrumentConfig(preset=item)
    if not isinstance(item, Mapping):
        fix = "write {preset: trl} or {module: ..., name: ..., role: ...}"
        raise ConfigError(field, item, "entries that are mappings, or names of presets", fix)
    return build(InstrumentConfig, item, field)
