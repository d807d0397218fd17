"""Tables of a report: rows that convert to dicts and to data frames, and blocks of text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore] # optional
    import polars  # type: ignore[import-not-found, unused-ignore] # optional

_Row = TypeVar("_Row", bound=msgspec.Struct)
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items grouped by key, in the order in which each key first occurs."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Table(tuple[_Row, ...]):
    """Rows of one type: a tuple that also converts to dicts and data frames.

    `Table(report.breakdown.lines)` makes a table of any rows of a report.
    """

    __slots__ = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for each row. Rows within a row are dicts as well."""
        rows: list[dict[str, Any]] = msgspec.to_builtins(tuple(self))
        return rows

    def to_polars(self) -> polars.DataFrame:
        """Return a column for each field; times are integers, in ns.

        Raises:
            StepscopeError: polars is not installed.
        """
        return Rows(self.to_dicts()).to_polars()

    def to_pandas(self) -> pandas.DataFrame:
        """Return a column for each field; times are integers, in ns.

        Raises:
            StepscopeError: pandas is not installed.
        """
        return Rows(self.to_dicts()).to_pandas()


class Rows(list[dict[str, Any]]):
    """Rows of a table as dicts."""

    __slots__ = ()

    def to_polars(self) -> polars.DataFrame:
        """Return a column for each field; times are integers, in ns.

        Raises:
            StepscopeError: polars is not installed.
        """
        # A setting may be a number in one row and a word in another. Such a column becomes text.
        return _library("polars").DataFrame(list(self), infer_schema_length=None, strict=False)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a column for each field; times are integers, in ns.

        Raises:
            StepscopeError: pandas is not installed.
        """
        return _library("pandas").DataFrame(list(self))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise StepscopeError(f"{name} cannot be imported ({error}). Fix: pip install {name}") from error


class TextTable(msgspec.Struct, frozen=True, tag="table"):
    """A titled table of printed cells."""

    title: str
    columns: tuple[str, ...]
    """Column names. A column whose name starts with `>` holds numbers, right-aligned and never broken."""
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    noun: str = ""
    """Noun for one row. A long table with a noun is cut in a terminal, and a note counts the rows left out. A
    table without a noun ("") is not cut."""


class Listing(msgspec.Struct, frozen=True, tag="list"):
    """A titled list of lines. A long list is cut in a terminal and folded on a page."""

    title: str
    lines: tuple[str, ...]
    bad: bool = False
    """True if the lines are problems, which a page shows in red."""


class Paragraph(msgspec.Struct, frozen=True, tag="text"):
    """A sentence or two without a title."""

    text: str


class Remark(msgspec.Struct, frozen=True):
    """A line, with further lines that explain it."""

    text: str
    details: tuple[str, ...] = ()


class Remarks(msgspec.Struct, frozen=True, tag="remarks"):
    """A titled list of remarks, never cut."""

    title: str
    remarks: tuple[Remark, ...]


Block: TypeAlias = TextTable | Listing | Paragraph | Remarks
