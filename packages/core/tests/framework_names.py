"""Names in a package's source, read without importing it: what the presets are held to.

    python packages/core/tests/framework_names.py slime path/to/source https://github.com/... COMMIT

writes what a preset's modules define into `tests/data/frameworks`, for packages that are on no index.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from stepscope.config.presets import place_of, preset_names, read_preset
from tests.downloads import members, wheel

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

DATA = Path(__file__).parent / "data" / "frameworks"


@cache
def _tree(path: Path) -> ast.Module:
    gc.disable()  # Python before 3.11.8 takes objects that the collector frees meanwhile for its own
    try:
        return ast.parse(path.read_bytes())
    finally:
        gc.enable()


def _file(source: Path, module: str) -> Path | None:
    folders = (source, source / "skyrl-gym")  # SkyRL's wheel has a package in a folder of its own
    places = [folder.joinpath(*module.split(".")) for folder in folders]
    files = (path for place in places for path in (place.with_suffix(".py"), place / "__init__.py"))
    return next((path for path in files if path.exists()), None)


def released(preset: str, version: str) -> Path:
    """Return the folder with the source of the preset's framework, as released."""
    loaded = read_preset(preset, lambda _: version)
    requirement = f"{loaded.distribution}=={version}"
    if preset == "rllib":  # 70 MB of Ray, most of it no Python
        return members(requirement, [f"{str(entry.module).replace('.', '/')}.py" for entry in loaded.entries])
    folder = wheel(requirement, *(("--python-version", "3.12") if preset == "skyrl" else ()))
    return next(iter(folder.glob("*.data/purelib")), folder)


def definition(source: Path, module: str, name: str) -> Function | None:
    """Return the function or method `name` of `module` under `source`, imported and inherited ones too."""
    *classes, function = name.split(".")
    target = _find(source, module, classes[0] if classes else function)
    if target is None:
        return None
    where, node = target
    if not classes:
        return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
    return _method(source, where, node, function) if isinstance(node, ast.ClassDef) else None


def arguments(function: Function) -> set[str]:
    """Return the names of its parameters."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    return {argument.arg for argument in every}


def _method(source: Path, module: str, node: ast.ClassDef, method: str) -> Function | None:
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name == method:
            return member
    for base in node.bases:
        target = _find(source, module, base.id) if isinstance(base, ast.Name) else None
        if target is not None and isinstance(target[1], ast.ClassDef):
            inherited = _method(source, target[0], target[1], method)
            if inherited is not None:
                return inherited
    return None


def _find(source: Path, module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the definition of `name` of `module`, after the imports on the way."""
    path = _file(source, module)
    if path is None:
        return None
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return module, node
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return _find(source, _target(path, module, node), original)
    return None


def _target(path: Path, module: str, node: ast.ImportFrom) -> str:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *((node.module or "").split("."))]).strip(".")


def record(preset: str, source: Path, repository: str, commit: str) -> None:
    """Write the preset's names that are in `source`."""
    entries = read_preset(preset).entries
    names = {f"{entry.module}:{entry.name}" for entry in entries}
    functions = {name: definition(source, *name.split(":")) for name in sorted(names)}
    parameters = {
        name: sorted(arguments(function)) for name, function in functions.items() if function is not None
    }
    DATA.mkdir(exist_ok=True)
    data = {
        "repository": repository,
        "commit": commit,
        "arguments": parameters,
        "settings": sorted(_settings_in(preset, source)),
    }
    (DATA / f"{preset}.json").write_text(json.dumps(data, indent=1) + "\n")
    for name in sorted(names - set(parameters)):
        print(f"not there: {name}")


def _settings_in(preset: str, source: Path) -> set[str]:
    """Return the preset's settings that `source` writes as options, or reads as attributes."""
    text = "\n".join(path.read_text() for path in source.rglob("*.py"))
    listed = read_preset(preset).settings
    return {
        setting.name
        for _, setting in (listed.items() if listed is not None else ())
        if re.search(rf'"{setting.name}"|[."]{place_of(setting.name)[-1]}\b', text)
    }


def settings_of(preset: str, source: Path) -> set[str]:
    """Return the settings that a released framework has."""
    if preset == "verl":
        tree = yaml.safe_load((source / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
        return set(_dotted(tree))
    if preset == "openrlhf":
        return set(re.findall(r'"(--[\w.]+)"', (source / "openrlhf/cli/train_ppo_ray.py").read_text()))
    module = _tree(source / "trl/trainer/grpo_config.py")
    nodes = [*ast.walk(module), *ast.walk(_tree(source / "trl/trainer/base_config.py"))]
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}  # of transformers' class below
    return read | {field.id for field in fields if isinstance(field, ast.Name)}


def _dotted(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{above}{name}.")


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in preset_names():
        sys.exit(__doc__)
    record(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
