"""Links to the files of a step."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from stepscope.report.formatting import size
from stepscope.report.html.markup import Html, tag
from stepscope.report.html.page import section, table


class StepFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a step, or a folder of its files, for a page to point to."""

    path: str
    """Relative to the page, with `/` between its parts."""
    what: str
    """A description for people."""
    bytes: int


def file_links(files: Sequence[StepFile]) -> Html:
    """Return links to the step's files, relative, so that a copied folder keeps them."""
    rows = [(_link(file.path), file.what, size(file.bytes)) for file in files]
    note = "Spans and traces are this page's sources; stepscope report --json prints all tables."
    return section("files", "Files", table(("file", "what", ">size"), rows), note=note)


def _link(path: str) -> Html:
    # "./" first: a name like `javascript:x` is a path then, and no scheme.
    return tag("a", path, href="./" + quote(path))
