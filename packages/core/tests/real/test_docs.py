"""The site of docs/ builds without a warning, holds all pages, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mkdocs
import pytest
from typer.main import get_command

from stepscope.config.presets import preset_names, read_preset
from stepscope.files.manifest import KNOBS
from stepscope_report.advice.remedies import REMEDIES
from stepscope_report.cli.app import app
from tests.tree import ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads, and the attributes that say where from."""


class Loads(HTMLParser):
    """Addresses that a page makes a browser load, and its classes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.addresses.append(values.get(LOADED.get(tag, "")) or "")
        self.classes |= set((values.get("class") or "").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", mkdocs.__name__, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    homes = {page.with_name("index") if page.name == "README" else page for page in pages}
    assert len(pages) > 20
    assert homes - made == set()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [Loads(path) for path in site.rglob("*.html")]
    assert [address for page in pages for address in page.addresses if "//" in address] == []
    # The theme fetches the library that draws these diagrams.
    assert not any("mermaid" in page.classes for page in pages)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"""url\(["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*""", styles) == []


def test_folded_notes_are_read_as_markdown(site: Path) -> None:
    pages = [path.read_text() for path in site.rglob("*.html")]
    notes = [note for page in pages for note in re.findall(r"<details>.*?</details>", page, re.DOTALL)]
    assert len(notes) > 5
    assert [note for note in notes if not re.search(r"<(p|li)>", note) or "`" in note or ".md)" in note] == []


def test_the_reference_of_the_command_line_has_every_command(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text()
    group: Any = get_command(app)
    names = list(group.commands)
    assert len(names) > 10
    assert [name for name in names if f'id="{name}"' not in page] == []


def test_the_reference_of_the_configuration_has_nested_fields(site: Path) -> None:
    page = (site / "reference" / "configuration.html").read_text()
    assert "roles.&lt;role&gt;.engine.iterations.count" in page
    assert "budget.keep_steps" in page


def test_the_reference_of_settings_has_those_of_every_framework_and_knob(site: Path) -> None:
    page = (site / "reference" / "settings.html").read_text()
    presets = [listed for name in preset_names() if (listed := read_preset(name).settings)]
    turned = {remedy.knob for remedies in REMEDIES.values() for remedy in remedies}
    names = {setting.name for listed in presets for knob, setting in listed.items() if knob in turned}
    assert len(names) > 40
    assert {name for name in (*names, *KNOBS, "max_num_seqs", "tp_size") if f">{name}<" not in page} == set()


def test_a_link_to_the_source_is_left_as_text(site: Path) -> None:
    assert '"../packages/' not in (site / "frameworks.html").read_text()
