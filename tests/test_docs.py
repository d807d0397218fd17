"""Truth of the pages: examples compile and load, links lead to files, public names are explained."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

import stepscope
from stepscope.config import ProfileConfig
from tests.tree import ROOT, files
from tools import reference

PAGES = [path for path in files(".md") if path.name != "CHANGELOG.md"]
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


class Example(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples(*languages: str) -> list[Example]:
    return [
        Example(page, page.read_text().count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[4]))
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        if match[2] in languages
    ]


@pytest.mark.parametrize("example", examples("python", "py"), ids=str)
def test_a_python_example_compiles(example: Example) -> None:
    # `...` bodies and top-level `await` and `async with` are how pages are written.
    flags = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(example.text, str(example), "exec", flags=flags)


@pytest.mark.parametrize("example", examples("yaml"), ids=str)
def test_a_yaml_example_is_a_valid_configuration(example: Example, tmp_path: Path) -> None:
    data = yaml.safe_load(example.text)
    assert isinstance(data, dict)
    # The examples' own folder is the reader's; here it must be one that can be written to.
    ProfileConfig.from_mapping({**data, "save_path": str(tmp_path)})


def test_a_link_in_a_page_leads_to_a_file() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("name", stepscope.__all__)
def test_a_public_name_is_in_the_pages(name: str) -> None:
    assert any(re.search(rf"\b{re.escape(name)}\b", page.read_text()) for page in PAGES)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_has_what_the_code_says(name: str) -> None:
    text = (reference.FOLDER / f"{name}.md").read_text()
    assert text == reference.page(name), "Fix: `python3 dev.py check --fix`"


def test_the_reference_of_the_configuration_has_every_field() -> None:
    page = (reference.FOLDER / "configuration.md").read_text()
    sections = list(reference.sections(ProfileConfig))
    fields = {
        f"{at}.{field.name}".lstrip(".")
        for at, section in sections
        for field in msgspec.structs.fields(section)
    }
    below = {at for at, _ in sections} | {at.removesuffix(".<role>") for at, _ in sections}
    assert len(fields) > 100
    assert {field for field in fields - below if f"| `{field}` |" not in page} == set()


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert [page.name for page in folder.glob("0*.md") if page.name not in index] == []


def test_every_group_of_entry_points_is_in_the_page_on_extensions() -> None:
    sources = ROOT.glob("packages/*/src/**/*.py")
    groups = {
        group
        for path in sources
        for group in re.findall(r'(?:GROUP = |entry_points\((?:group=)?)"(stepscope\.\w+)"', path.read_text())
    }
    page = (ROOT / "docs" / "extending.md").read_text()
    assert len(groups) > 5
    assert {group for group in groups if f"`{group}`" not in page} == set()
