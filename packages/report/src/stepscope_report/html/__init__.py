"""Reports as pages. Each page is one file that opens offline and loads nothing.

Here are the parts that all pages share: markup, the frame of a page, sections, tables, lists, and colours of
stages.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import chain, repeat
from zlib import crc32

from stepscope_report.accounting import Label
from stepscope_report.division import NOT_KNOWN, STALLED, WINDOWS
from stepscope_report.formatting import plain
from stepscope_report.table import Block, Listing, Paragraph, TextTable


class Html(str):
    """Markup. Every other `str` is plain text and is escaped when it is put into markup."""

    __slots__ = ()


EMPTY = Html("")


def text(value: str) -> Html:
    """Return plain text as markup, also for the value of an attribute. Control characters become visible
    escapes.
    """
    return Html(escape(value if value.isprintable() else plain(value)))


def tag(name: str, *children: str | Html, **attributes: str | int | None) -> Html:
    """Return an element: `tag("td", "a < b", class_="n", data_t="...")`. Attributes with the value None are
    left out.
    """
    inner = "".join(child if isinstance(child, Html) else text(child) for child in children)
    return Html(f"<{name}{_attributes(attributes)}>{inner}</{name}>")


def join(*parts: Html) -> Html:
    return Html("".join(parts))


def _attributes(attributes: dict[str, str | int | None]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )


_SECTION = re.compile(r'<section id="([^"]+)"><h2>(.*?)</h2>')
_FEW = 4
"""Number of sections from which a page has a table of contents."""
ROWS = 24
"""Number of rows that a table shows at once. A longer table scrolls on the screen, and is cut off on
paper."""


@cache
def _resource(name: str) -> str:
    return (files("stepscope_report.html") / name).read_text(encoding="utf-8")


def page(title: str, *body: Html, groups: Mapping[str, str] | None = None) -> str:
    """Return a whole document. Its content security policy lets only the page's own script run and forbids
    loading anything.

    Args:
        groups: Links at the top of the page: anchor of a section by name of the link. None for a link to
            each section.
    """
    import hashlib  # here: OpenSSL takes 4 MB, and a report without a page needs none

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
    """Return the anchor of the first section in the markup, or None if it has no section."""
    found = _SECTION.search(content)
    return None if found is None else found[1]


def _contents(content: str, groups: Mapping[str, str] | None) -> Html:
    """Return the links at the top, which stay visible while the page scrolls."""
    if groups is not None:
        return tag("nav", *(tag("a", name, href=f"#{anchor}") for name, anchor in groups.items()))
    sections = _SECTION.findall(content)
    if len(sections) < _FEW:
        return EMPTY
    return tag("nav", *(tag("a", Html(title), href=f"#{name}") for name, title in sections))


def section(name: str, title: str, *body: Html, note: str = "") -> Html:
    """Return a titled section of a page. `name` is its anchor."""
    explained = tag("p", note, class_="note") if note else EMPTY
    return tag("section", tag("h2", title), *body, explained, id=name)


def draw_section(name: str, title: str, blocks: Iterable[Block]) -> Iterator[Html]:
    """Yield a section with the blocks, or nothing if there are no blocks."""
    if parts := [draw(block, title) for block in blocks]:
        yield section(name.replace("_", "-"), title, *parts)


def draw(block: Block, heading: str = "") -> Html:
    """Return a block as markup. Words of its title that `heading` already has are left out."""
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
    """Return a table. Columns whose name starts with `>` hold numbers."""
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


def illustrated(block: TextTable, at: int, heading: str, drawings: Sequence[Html], name: str = "") -> Html:
    """Return the table of a block with a column of drawings before column `at`. Rows after the last drawing
    have an empty cell there.
    """
    columns = (*block.columns[:at], heading, *block.columns[at:])
    drawn = chain(drawings, repeat(EMPTY))
    rows = [(*row[:at], drawing, *row[at:]) for row, drawing in zip(block.rows, drawn, strict=False)]
    return table(columns, rows, name)


def listing(title: str, lines: Sequence[str], kind: str = "") -> Html:
    """Return a titled list. The end of a long list is folded; on paper, only its number of lines is shown."""
    seen, rest = lines[: ROWS // 2], lines[ROWS // 2 :]
    start = join(tag("h3", title) if title else EMPTY, _bullets(seen, kind))
    if not rest:
        return start
    return join(start, tag("details", tag("summary", f"and {len(rest):,} more"), _bullets(rest, kind)))


def _bullets(lines: Sequence[str], kind: str) -> Html:
    return tag("ul", *(tag("li", line) for line in lines), class_=kind or None)


def swatched(colour: str, name: str) -> Html:
    """Return a name after a swatch of its colour. `colour` is a class of `page.css`."""
    return join(tag("i", class_=f"swatch {colour}"), tag("span", name))


def legend(names: Iterable[tuple[str, str]]) -> Html:
    """Return a legend on one line. Each name is (CSS class of the colour, text)."""
    items = (tag("span", tag("i", class_=f"swatch {colour}"), name) for colour, name in names)
    return tag("p", *items, class_="legend")


def mark(colour: str, at: float, part: float, whole: float, hover: str) -> Html:
    """Return a piece of a bar. `hover` is the text under the pointer."""
    place = f"left:{percent(at, whole)};width:{percent(part, whole)}"
    return tag("i", class_=f"m {colour}", style=place, data_t=hover)


def stacked(parts: Iterable[tuple[str, float, str]], whole: float) -> Html:
    """Return a bar of pieces side by side. Each piece is (CSS class, length, text under the pointer)."""
    marks, at = [], 0.0
    for colour, part, hover in parts:
        marks.append(mark(colour, at, part, whole, hover))
        at += part
    return tag("div", *marks, class_="fall")


def percent(part: float, whole: float) -> str:
    """Return a length for CSS as a percentage of `whole`, exact to a thousandth of a pixel on a laptop's
    screen; `0%` if `whole` is 0.
    """
    return f"{100 * part / whole:.6g}%" if whole else "0%"


COMMON = {
    "generate": 9, "generate_sequences": 9, "rollout": 9, "decode": 0, "prefill": 1,
    "trajectory": 3, "turn": 12, "tool": 5, "env": 5, "compute_reward": 6, "reward": 6,
    "compute_log_prob": 7, "old_log_prob": 7, "compute_ref_log_prob": 4, "ref": 4, "compute_values": 11,
    "values": 11,
    "compute_advantages": 8, "adv": 8, "update_actor": 2, "train": 2, "training_step": 2, "update_critic": 13,
    "forward": 14, "backward": 15, "optimizer": 16, "sync_weights": 10, "update_weights": 10, "load_data": 17,
    "save_checkpoint": 18,
}  # fmt: skip
"""{common stage: number in the CSS class of its colour}. The classes are `c0` to `c18`."""
_LEGEND = 20
"""Largest number of names in a legend."""
_HASHED = range(14, 24)
"""Numbers in the CSS classes of all other stages. The number is chosen by a hash of the stage's name."""


def colour_of(stage: str) -> str:
    """Return the CSS class of a stage's colour, which is the same on all pages."""
    number = COMMON.get(stage)
    return f"c{_HASHED[crc32(stage.encode()) % len(_HASHED)] if number is None else number}"


class Colours:
    """CSS classes of the colours of a page's stages. A stage of two roles has one colour."""

    def __init__(self, labels: Iterable[Label], waiting: Iterable[Label] = ()) -> None:
        """
        Args:
            labels: The stages of the page, in the order of its legends.
            waiting: The labels of waiting stages, which share a grey.
        """
        self.labels: Sequence[Label] = tuple(dict.fromkeys(labels))
        self._waiting = frozenset(waiting)

    def of(self, label: Label) -> str:
        if label in (STALLED, WINDOWS):
            return "profiler"
        if label == NOT_KNOWN:
            return "unaccounted"
        return "cw" if label in self._waiting else colour_of(label[1])

    def swatched(self, label: Label, name: str) -> Html:
        return swatched(self.of(label), name)

    def legend(self, used: Iterable[Label]) -> Html:
        """Return the legend of the stages that a chart uses, in the page's order."""
        drawn = set(used)
        names = dict.fromkeys((self.of(label), label[1]) for label in self.labels if label in drawn)
        shown = [*names][:_LEGEND]
        if len(names) > len(shown):
            shown.append(("", f"and {len(names) - len(shown)} other stages, named under the pointer"))
        return legend(shown)
