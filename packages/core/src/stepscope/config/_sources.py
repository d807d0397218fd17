"""Layers of settings (a file, the environment, arguments), and their merge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin

import msgspec

from stepscope.config._fields import (
    Mistakes,
    Section,
    build,
    closest,
    convert,
    in_words,
    kinds,
    section_of,
    take,
)
from stepscope.config._roles import hides
from stepscope.errors import ConfigError

PREFIX = "STEPSCOPE_"
_FINISH = frozenset(PREFIX + name for name in ("PID", "STEP", "STEP_PATH"))
"""Variables that stepscope sets for `finish.command` alone."""
RESERVED_VARIABLES = _FINISH | frozenset(
    PREFIX + name
    for name in ("COLLECTIVE_KERNELS", "CONFIG", "DISABLE", "RAISE", "RANK", "ROLE", "RUN_ID", "RUN_PID")
)
"""`STEPSCOPE_` variables that are not fields of `ProfileConfig`."""


def overlay(lower: Mapping[str, object], upper: Mapping[str, object]) -> dict[str, object]:
    """Return `lower` updated by `upper`: mappings are merged key by key, other values are replaced."""
    result = dict(lower)
    for key, value in upper.items():
        below = result.get(key)
        if not isinstance(below, Mapping) or not isinstance(value, Mapping):
            result[key] = value
        elif key == "roles":
            result[key] = _overlay_roles(below, value)
        else:
            result[key] = overlay(below, value)
    return result


def _overlay_roles(lower: Mapping[str, object], upper: Mapping[str, object]) -> dict[str, object]:
    """Merge roles. A role that only `upper` has is inserted before the first pattern that would hide the
    role, else last.
    """
    known = {pattern: value for pattern, value in upper.items() if pattern in lower}
    items = list(overlay(lower, known).items())
    for pattern, value in upper.items():
        if pattern not in lower:
            hiding = (at for at, (other, _) in enumerate(items) if hides(other, pattern))
            items.insert(next(hiding, len(items)), (pattern, value))
    return dict(items)


def refuse_verl(data: Mapping[str, object], field: str) -> None:
    """Check that `data` is not a configuration of verl.

    Raises:
        ConfigError: `data` has verl's keys.
    """
    trainer = data.get("trainer")
    is_sft = "profiler" in data and isinstance(trainer, Mapping) and "profile_interval" in trainer
    if is_sft or {"global_profiler", "actor_rollout_ref"} & data.keys():
        fix = "pass it to ProfileConfig.from_verl, and the result to configure"
        allowed = "stepscope's own settings: steps, save_path, tool..."
        raise ConfigError(field, "a configuration of verl", allowed, fix)


def file_layer(
    root: type[Section], path: str | os.PathLike[str], *, named_by: str = "the configuration file"
) -> Mapping[str, object]:
    """Return the settings of a YAML file, after checking them without the other layers.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a wrong setting. The error names the file.
    """
    from stepscope.config._yaml import load  # imported here, because yaml takes 20 ms

    data = load(path, named_by)
    refuse_verl(data, os.fspath(path))
    try:
        build(root, data, "")
    except ConfigError as error:
        raise _located(error, os.fspath(path)) from None
    return data


def environment_layer(root: type[Section], environ: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of `STEPSCOPE_*` variables. A variable's name is the setting's name in upper case,
    with two underscores for each dot. Mappings are JSON.

    Raises:
        ConfigError: a variable does not name a setting, or its text is not a value of that setting.
    """
    layer: dict[str, object] = {}
    mistakes = Mistakes()
    # `finish.command` gets all three variables. STEPSCOPE_STEP alone is a typing error for STEPSCOPE_STEPS.
    reserved = RESERVED_VARIABLES if environ.keys() >= _FINISH else RESERVED_VARIABLES - _FINISH
    # Sorted, so that STEPSCOPE_TORCH__WITH_STACK is applied after STEPSCOPE_TORCH.
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in reserved:
            path = variable.removeprefix(PREFIX).lower().split("__")
            *above, name = path
            with mistakes.noted():
                nested = {name: _value_of(root, path, variable, environ[variable])}
                for part in reversed(above):
                    nested = {part: nested}
                layer = overlay(layer, nested)
    mistakes.raise_any()
    return layer


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each unknown `STEPSCOPE_*` variable, with the most similar known name."""
    from stepscope.config._profile import ProfileConfig  # imported here, because _profile imports this module

    lines = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in RESERVED_VARIABLES:
            path = variable.removeprefix(PREFIX).lower().split("__")
            if not _is_setting(ProfileConfig, path):
                lines.append(_unknown_variable(ProfileConfig, path, variable, environ[variable]).fix)
    return lines


def _is_setting(root: type[Section], path: list[str]) -> bool:
    kind: object | None = root
    for part in path:
        kind = None if kind is None else _below(kind, part)
    return kind is not None


def _value_of(root: type[Section], path: list[str], variable: str, text: str) -> object:
    """Return the value of the setting at `path`, converted from the `text` of a variable."""
    *above, name = path
    owner: object = root
    for part in above:
        owner = _below(owner, part)
    kind = _below(owner, name)
    if kind is None:
        raise _unknown_variable(root, path, variable, text)
    section = section_of(owner)
    parser = section._parsers.get(name) if section else None
    field = ".".join(path)
    try:
        if section_of(kind) or get_origin(kind) is dict:
            data = _decode(kind, text, field)
            parser(data, field) if parser else take(kind, data, field)
            return data  # a mapping is converted later, after it is merged with other layers
        return parser(text, field) if parser else convert(kind, text, field, from_text=True)
    except ConfigError as error:
        raise _located(error, variable) from None


def _decode(kind: object, text: str, field: str) -> object:
    try:
        data: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        fix = "write {...}, or set one of its keys alone: two underscores, then the key"
        raise ConfigError(field, text, f"JSON of {in_words(kind)}", fix) from None
    return data


def _below(kind: object, part: str) -> object | None:
    """Return the type of the setting `part` in a section of type `kind`, or None if there is none."""
    section = section_of(kind)
    if section is not None:
        return kinds(section).get(part)
    # `roles` is a dict of sections, so each name is a setting. The keys of `engine.extra` are not settings:
    # only JSON can give the types of its values.
    return section_of(get_args(kind)[1]) if get_origin(kind) is dict and part else None


def _unknown_variable(root: type[Section], path: list[str], variable: str, text: str) -> ConfigError:
    role = path[1] if path[0] == "roles" and len(path) > 1 else "<role>"
    known = [*sorted(RESERVED_VARIABLES - _FINISH), *(PREFIX + name.upper() for name in _names(root, role))]
    near = closest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known])
    top = ", ".join(PREFIX + name.upper() for name in kinds(root))
    allowed = f"{top}, and their keys after two underscores ({PREFIX}TORCH__WITH_STACK)"
    meant = f"did you mean {PREFIX + near!r}?" if near else "unset it"
    return ConfigError(variable, text, allowed, f"there is no {variable!r}; {meant}")


def _names(section: type[Section], role: str) -> Iterator[str]:
    """Yield the path of every setting, with two underscores for each dot."""
    for name, kind in kinds(section).items():
        yield name
        if get_origin(kind) is dict:
            kind, name = _below(kind, role), f"{name}__{role}"
        inner = section_of(kind)
        if inner is not None:
            yield from (f"{name}__{below}" for below in _names(inner, role))


def _located(error: ConfigError, where: str) -> ConfigError:
    also = [_located(other, where) for other in error.also]
    return ConfigError(error.field, error.value, error.allowed, f"{error.fix} (in {where})", also)
