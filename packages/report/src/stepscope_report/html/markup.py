"""HTML that is safe by its type: text becomes `Html` only by being escaped."""

from __future__ import annotations

from html import escape

from stepscope_report.formatting import plain


class Html(str):
    """Markup. Every other `str` is text, and is escaped when it is put into markup."""

    __slots__ = ()


EMPTY = Html("")


def text(value: str) -> Html:
    """Return `value` as text or as an attribute's value. Control characters become visible escapes."""
    return Html(escape(value if value.isprintable() else plain(value)))


def tag(name: str, *children: str | Html, **attributes: str | int | None) -> Html:
    """Return an element: `tag("td", "a < b", class_="n", data_t="...")`. An attribute of None is left out."""
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
