"""Colours of stages on a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepscope_report.accounting import Label
from stepscope_report.division import NOT_KNOWN, STALLED, WINDOWS
from stepscope_report.html.markup import Html
from stepscope_report.html.page import legend, swatched

COLOURS = 14
"""Number of classes `c0`, `c1` ... in `page.css`; further stages share `co`."""


class Colours:
    """A class for each stage: the same one all over a page."""

    def __init__(self, labels: Iterable[Label], waiting: Iterable[Label] = ()) -> None:
        """Args: waiting: The labels of waiting stages, which share a grey."""
        self.labels: Sequence[Label] = tuple(dict.fromkeys(labels))
        self._waiting = frozenset(waiting)
        working = (label for label in self.labels if label not in self._waiting)
        self._named = {label: f"c{place}" for place, label in zip(range(COLOURS), working, strict=False)}

    def of(self, label: Label) -> str:
        if label in (STALLED, WINDOWS):
            return "profiler"
        if label == NOT_KNOWN:
            return "unaccounted"
        return "cw" if label in self._waiting else self._named.get(label, "co")

    def swatched(self, label: Label, name: str) -> Html:
        return swatched(self.of(label), name)

    def legend(self, used: Iterable[Label]) -> Html:
        """Return the legend of the stages used in one chart, in the page's order."""
        drawn = set(used)
        shown = [label for label in self.labels if label in drawn]
        named = [label for label in shown if self.of(label) != "co"]
        names = [(self.of(label), " ".join(label)) for label in named]
        if len(shown) > len(named):
            names.append(("co", f"{len(shown) - len(named)} other stages"))
        return legend(names)
