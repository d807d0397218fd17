"""Colours of stages on a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from stepscope_report.accounting import Label
from stepscope_report.division import NOT_KNOWN, STALLED, WINDOWS
from stepscope_report.html.markup import Html
from stepscope_report.html.page import legend, swatched

COMMON = {
    "generate": 9, "generate_sequences": 9, "rollout": 9, "decode": 0, "prefill": 1,
    "trajectory": 3, "turn": 12, "tool": 5, "env": 5, "compute_reward": 6, "reward": 6,
    "compute_log_prob": 7, "old_log_prob": 7, "compute_ref_log_prob": 4, "ref": 4, "compute_values": 11,
    "values": 11,
    "compute_advantages": 8, "adv": 8, "update_actor": 2, "train": 2, "training_step": 2, "update_critic": 13,
    "forward": 14, "backward": 15, "optimizer": 16, "sync_weights": 10, "update_weights": 10, "load_data": 17,
    "save_checkpoint": 18,
}  # fmt: skip
"""The colours of common stages: numbers of the classes `c0` to `c18` of `page.css`."""
LEGEND = 20
"""Most names in a legend."""
HASHED = range(14, 24)
"""Numbers of the classes among which the names of all other stages choose."""


def colour_of(stage: str) -> str:
    """Return the class of a stage's name, which is the same on all pages."""
    number = COMMON.get(stage)
    return f"c{HASHED[crc32(stage.encode()) % len(HASHED)] if number is None else number}"


class Colours:
    """The class of each stage on a page, by its name alone: a stage of two roles has one colour."""

    def __init__(self, labels: Iterable[Label], waiting: Iterable[Label] = ()) -> None:
        """Args: waiting: The labels of waiting stages, which share a grey."""
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
        """Return the legend of the stages used in one chart, in the page's order."""
        drawn = set(used)
        names = dict.fromkeys((self.of(label), label[1]) for label in self.labels if label in drawn)
        shown = [*names][:LEGEND]
        if len(names) > len(shown):
            shown.append(("", f"and {len(names) - len(shown)} other stages, named under the pointer"))
        return legend(shown)
