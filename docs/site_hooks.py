"""Parts of the site that are made when it is built: references from the code, and links out of docs/."""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args, get_origin

import msgspec
import typer
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import stepscope_sglang._driving.facts as sglang
import stepscope_vllm._driving.facts as vllm
from stepscope.cli.app import app
from stepscope.config import ProfileConfig
from stepscope.config.presets import preset_names, read_preset
from stepscope.files.manifest.settings import KNOBS
from stepscope.report.advice.remedies import REMEDIES

ROOT = Path(__file__).resolve().parent.parent
GUESTS = {"benchmarks/README.md": "benchmarks.md"}
"""Pages from elsewhere in the repository, and their places in the site."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
MARKER = re.compile(r"<!-- generated: (\w+) -->")
FOLDED = "<details><summary>", '<details markdown="1"><summary markdown="span">'
"""The begin of a folded note as pages have it, and with which its text is read as Markdown."""


# Events of mkdocs -------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions in the navigation, which the file does by a pattern."""
    section = config.nav[-1]["Design and decisions"]
    pattern = section.pop()
    section += [f"decisions/{page.name}" for page in sorted((ROOT / "docs").glob(pattern))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, place in GUESTS.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    made = MARKER.sub(lambda marker: GENERATORS[marker[1]](), markdown)
    return with_links_inside(made, page.file.src_uri).replace(*FOLDED)


# Links ------------------------------------------------------------------------------------------------------


def with_links_inside(markdown: str, place: str) -> str:
    """Lead links to pages of the site, and leave the bare text of those to other files of the repository."""
    homes = {guest: home for home, guest in GUESTS.items()}
    folder = posixpath.dirname(homes.get(place, f"docs/{place}"))

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        file = posixpath.normpath(posixpath.join(folder, target))
        inside = GUESTS.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if inside is None:
            return text
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(place) or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


# Configuration ----------------------------------------------------------------------------------------------


def configuration() -> str:
    """Return a table of fields for each section of the configuration, from its docstrings."""
    return "\n\n".join(section_table(at, section) for at, section in sections(ProfileConfig))


def sections(section: type[msgspec.Struct], at: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield a section and those below it, with the dotted names under which a file has them."""
    yield at, section
    for field in msgspec.structs.fields(section):
        inner = struct_in(field.type)
        if inner is not None and field.name != "steps":
            key = f"{field.name}.<role>" if get_origin(field.type) is dict else field.name
            yield from sections(inner, f"{at}.{key}".lstrip("."))


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the section that a type is, or is made of: `X`, `X | None`, `tuple[X, ...]`."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def section_table(at: str, section: type[msgspec.Struct]) -> str:
    """Return the heading of a section, its summary, and a row for each field that is no section itself."""
    texts = attribute_docstrings(section)
    prefix = f"{at}." if at else ""
    rows = [
        f"| `{prefix}{field.name}` | `{as_yaml(default_of(field))}` | {one_line(texts[field.name])} |"
        for field in msgspec.structs.fields(section)
        if field.name in texts and not isinstance(default_of(field), msgspec.Struct)
    ]
    heading = f"## `{at}`" if at else "## The run"
    head = [heading, "", one_line(inspect.getdoc(section) or ""), ""]
    return "\n".join([*head, "| field | default | effect |", "|---|---|---|", *rows])


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """Return the default of a field, that of `roles` by pattern and without its engines."""
    if field.name == "roles":
        roles = ProfileConfig().roles
        return {name: {"ranks": role.ranks, "profiler": role.profiler} for name, role in roles.items()}
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def as_yaml(value: object) -> str:
    """Return a value as a file has it, on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def attribute_docstrings(section: type) -> Mapping[str, str]:
    """Return {attribute: the docstring below it} of a class."""
    (definition,) = ast.parse(dedent(inspect.getsource(section))).body
    texts: dict[str, str] = {}
    for node, following in pairwise(getattr(definition, "body", ())):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = text
    return texts


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Command line -----------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the help of every command: its line of use, its arguments and its options."""
    group: Any = typer.main.get_command(app)  # the types of its commands are typer's own
    return "\n\n".join(
        text for name, command in group.commands.items() for text in command_texts(name, command)
    )


def command_texts(name: str, command: Any) -> list[str]:
    """Return the help of a command, and of those in it."""
    inner = getattr(command, "commands", {})
    return [command_text(name, command)] + [command_text(f"{name} {below}", inner[below]) for below in inner]


def command_text(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["stepscope", name, *command.collect_usage_pieces(context)])
    rows = [parameter_row(parameter) for parameter in command.params if parameter.name != "help"]
    head = [f"## {name}", "", "```text", usage, "```", "", dedent(command.help or "").strip(), ""]
    return "\n".join([*head, "| argument | default | effect |", "|---|---|---|", *rows])


def parameter_row(parameter: Any) -> str:
    names = parameter.opts
    if parameter.param_type_name == "argument":
        names = [parameter.metavar or parameter.name.upper()]
    default = parameter.default
    is_shown = isinstance(default, str | int | float | Path) and default is not False and default != ""
    cells = [f"`{', '.join([*names, *parameter.secondary_opts])}`", f"`{default}`" if is_shown else ""]
    return f"| {' | '.join([*cells, one_line(parameter.help or '')])} |"


# Settings that advice names ---------------------------------------------------------------------------------


def settings() -> str:
    """Return a table of the settings that each rule of advice names, and one of the knobs."""
    columns = settings_by_framework()
    rules = []
    for rule, remedies in REMEDIES.items():
        knobs = [remedy.knob for remedy in remedies]
        rules.append(" | ".join([f"`{rule}`", *(names_of(knobs, names) for names in columns.values())]))
    effects = [f"`{knob}` | {effect}" for knob, effect in KNOBS.items()]
    return "\n\n".join(
        [table(["rule", *columns], rules), "## Knobs", table(["knob", "its setting is"], effects)]
    )


def settings_by_framework() -> Mapping[str, Mapping[str, str]]:
    """Return {framework or engine: {knob: name}}."""
    presets = {name: read_preset(name).settings for name in preset_names()}
    frameworks = {
        name: {knob: setting.name for knob, setting in listed.items()}
        for name, listed in presets.items()
        if listed is not None
    }
    return {
        **frameworks,
        "vllm": {knob: name for knob, (_, name) in vllm.SETTINGS.items()},
        "sglang": {knob: name for knob, (name, _) in sglang.SETTINGS.items()},
    }


def names_of(knobs: Iterable[str], names: Mapping[str, str]) -> str:
    return ", ".join(f"`{names[knob]}`" for knob in knobs if knob in names)


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {row} |" for row in rows)])


GENERATORS = {"configuration": configuration, "commands": commands, "settings": settings}
