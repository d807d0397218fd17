"""Parts that all pages share: the frame, which loads nothing, sections, tables and lists."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files

from stepscope_report.block import Block, Listing, Paragraph, TextTable
from stepscope_report.html.markup import EMPTY, Html, join, tag, text

_SECTION = re.compile(r'<section id="([^"]+)"><h2>(.*?)</h2>')
_FEW = 4
"""A page with at least this many sections has a table of contents."""
ROWS = 24
"""Number of rows of a table that are visible at once. A longer table scrolls; a printed page shows only these
rows."""


@cache
def _resource(name: str) -> str:
    return (files("stepscope_report.html") / name).read_text(encoding="utf-8")


def page(title: str, *body: Html, groups: Mapping[str, str] | None = None) -> str:
    """Return a whole document. Its policy lets only the page's own script run, and nothing be loaded.

    Args:
        groups: {name: the section in front of it}: the links at the top. None for a link to each section.
    """
    script, content = _resource("page.js"), "".join(body)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_resource('page.css')}</style></head>\n"
        f'<body>{_contents(content, groups)}{content}<div id="tip" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )


def first_section(content: str) -> str | None:
    """Return the anchor of the first section in some markup."""
    found = _SECTION.search(content)
    return None if found is None else found[1]


def _contents(content: str, groups: Mapping[str, str] | None) -> Html:
    """Return the table of contents, which stays in view."""
    if groups is not None:
        return tag("nav", *(tag("a", name, href=f"#{anchor}") for name, anchor in groups.items()))
    sections = _SECTION.findall(content)
    if len(sections) < _FEW:
        return EMPTY
    return tag("nav", *(tag("a", Html(title), href=f"#{name}") for name, title in sections))


def section(name: str, title: str, *body: Html, note: str = "") -> Html:
    """Return a titled part of a page. `name` is its anchor."""
    explained = tag("p", note, class_="note") if note else EMPTY
    return tag("section", tag("h2", title), *body, explained, id=name)


def draw_section(name: str, title: str, blocks: Iterable[Block]) -> Iterator[Html]:
    """Yield a section of tables and lists. Nothing without a block."""
    if parts := [draw(block, title) for block in blocks]:
        yield section(name.replace("_", "-"), title, *parts)


def draw(block: Block, heading: str = "") -> Html:
    """Return a block as a page shows it. Its title is left out as far as the heading above says it."""
    if isinstance(block, Paragraph):
        return tag("p", block.text, class_="said")
    words = block.title.removeprefix(heading).lstrip(": ")
    if isinstance(block, Listing):
        return listing(words, block.lines, "bad" if block.bad else "")
    title = tag("h3", words) if words else EMPTY
    if isinstance(block, TextTable):
        note = tag("p", block.note, class_="note") if block.note else EMPTY
        return join(title, table(block.columns, block.rows), note)
    items = (tag("li", tag("b", r.text), *(tag("div", line) for line in r.details)) for r in block.remarks)
    return join(title, tag("ul", *items))


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Html]], name: str = "") -> Html:
    """Return a table. A column whose name starts with `>` holds numbers."""
    classes = ["n" if column.startswith(">") else None for column in columns]
    head = tag("tr", *(tag("th", c.lstrip(">"), class_=k) for c, k in zip(columns, classes, strict=True)))
    lines = [
        tag("tr", *(tag("td", cell, class_=k) for cell, k in zip(row, classes, strict=True))) for row in rows
    ]
    grid = tag("table", tag("thead", head), tag("tbody", *lines), id=name or None)
    if len(lines) <= ROWS:
        return tag("div", grid, class_="wide")
    cut = tag("p", f"Printed are the first {ROWS} of {len(lines):,} rows.", class_="note printed")
    return join(tag("div", grid, class_="wide scroll"), cut)


def listing(title: str, lines: Sequence[str], kind: str = "") -> Html:
    """Return a titled list. The end of a long list is folded; a printed page only gives its number of
    lines.
    """
    seen, rest = lines[: ROWS // 2], lines[ROWS // 2 :]
    start = join(tag("h3", title) if title else EMPTY, _bullets(seen, kind))
    if not rest:
        return start
    return join(start, tag("details", tag("summary", f"and {len(rest):,} more"), _bullets(rest, kind)))


def _bullets(lines: Sequence[str], kind: str) -> Html:
    return tag("ul", *(tag("li", line) for line in lines), class_=kind or None)


def swatched(colour: str, name: str) -> Html:
    """Return a name behind a swatch of its colour, a class of `page.css`."""
    return join(tag("i", class_=f"swatch {colour}"), tag("span", name))


def legend(names: Iterable[tuple[str, str]]) -> Html:
    """Return a legend of (colour, name) on one line."""
    items = (tag("span", tag("i", class_=f"swatch {colour}"), name) for colour, name in names)
    return tag("p", *items, class_="legend")


def mark(colour: str, at: float, part: float, whole: float, hover: str) -> Html:
    """Return a piece of a bar, with the text under the pointer."""
    place = f"left:{percent(at, whole)};width:{percent(part, whole)}"
    return tag("i", class_=f"m {colour}", style=place, data_t=hover)


def stacked(parts: Iterable[tuple[str, float, str]], whole: float) -> Html:
    """Return a bar of (colour, length, text under the pointer), drawn side by side."""
    marks, at = [], 0.0
    for colour, part, hover in parts:
        marks.append(mark(colour, at, part, whole, hover))
        at += part
    return tag("div", *marks, class_="fall")


def percent(part: float, whole: float) -> str:
    """Return a CSS length in percent, precise to a thousandth of a pixel on a laptop's screen."""
    return f"{100 * part / whole:.6g}%" if whole else "0%"
