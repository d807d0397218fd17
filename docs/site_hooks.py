"""Parts of the site that are made when it is built: its navigation, guests, and links out of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
GUESTS = {"benchmarks/README.md": "benchmarks.md"}
"""Pages from elsewhere in the repository, and their places in the site."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
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
    return with_links_inside(markdown, page.file.src_uri).replace(*FOLDED)


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
