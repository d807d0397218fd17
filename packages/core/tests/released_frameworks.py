"""The frameworks of the presets, as released and as recorded, for tests of the presets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stepscope.config.presets import Preset, read_preset
from tests.downloads import members, wheel
from tools.framework_facts import DATA, FunctionFacts, Source, facts_of, read_facts

RELEASES = [
    ("trl", "0.29.0"),
    ("trl", "1.16.0"),
    ("verl", "0.7.0"),
    ("verl", "0.9.1"),
    ("openrlhf", "0.10.4"),
    ("openrlhf", "0.11.2"),
    ("areal", "1.0.4"),
    ("skyrl", "0.4.0"),
    ("rllib", "2.60.0"),
]
NEWEST = "newest"
"""The version that `tools/framework_facts.py` recorded last."""
VERSIONS = [*RELEASES, *((path.stem, NEWEST) for path in sorted(DATA.glob("*.json")))]
LOST = {
    (
        "skyrl",
        "training_phase",
    ): "evaluation is told apart otherwise in its main branch: its trajectories count too"
}
"""(preset, argument) -> what is lost where the newest version of a framework has the argument no more."""
NOT_THEIRS = ("transformers", "accelerate")
"""Libraries below TRL, which are in no wheel of TRL's."""


def released(preset: str, version: str) -> Path:
    """Return the folder with the source of the preset's framework, as released."""
    loaded = read_preset(preset, lambda _: version)
    requirement = f"{loaded.distribution}=={version}"
    if preset == "rllib":  # 70 MB of Ray, most of it no Python
        modules = ["ray.util.annotations", "ray.rllib.utils.annotations"]
        modules += [str(entry.module) for entry in loaded.entries]
        return members(requirement, [f"{module.replace('.', '/')}.py" for module in modules])
    folder = wheel(requirement, *(("--python-version", "3.12") if preset == "skyrl" else ()))
    return next(iter(folder.glob("*.data/purelib")), folder)


def preset_at(name: str, version: str) -> Preset:
    if version == NEWEST:
        return read_preset(name, lambda _: read_facts(name).version)
    loaded = read_preset(name, lambda _: version)
    return Preset(
        name=name,
        distribution=loaded.distribution,
        tested=loaded.tested,
        entries=tuple(e for e in loaded.entries if str(e.module).split(".")[0] not in NOT_THEIRS),
        integration=loaded.integration,
        covers=loaded.covers,
        settings=loaded.settings,
    )


@cache
def facts_at(name: str, version: str) -> dict[str, FunctionFacts]:
    """Return the facts about a preset's functions in one version of its framework."""
    if version == NEWEST:
        return read_facts(name).functions
    return facts_of(preset_at(name, version), Source(released(name, version)))


def settings_of(preset: str, source: Path) -> set[str]:
    if preset == "verl":
        tree = yaml.safe_load((source / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
        return set(_dotted(tree))
    if preset == "openrlhf":
        return set(re.findall(r'"(--[\w.]+)"', (source / "openrlhf/cli/train_ppo_ray.py").read_text()))
    files = ("trl/trainer/grpo_config.py", "trl/trainer/base_config.py")
    nodes = [node for file in files for node in ast.walk(Source(source).tree(source / file))]
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}  # of transformers' class below
    return read | {field.id for field in fields if isinstance(field, ast.Name)}


def _dotted(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{above}{name}.")
