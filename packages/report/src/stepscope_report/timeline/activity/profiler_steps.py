"""Steps that torch's profiler names `ProfilerStep#N`, each with what ran in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain

from stepscope_report.timeline.activity.content import ProfilerStep, Work
from stepscope_report.timeline.activity.intervals import Pair, Stretches, length

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_LOADING, _OPTIMIZER = "enumerate(DataLoader)#", "Optimizer.step#"
_MOST = 1 << 16
"""Largest number of ranges of each kind that are kept of a trace."""


class ProfilerSteps:
    """The steps of one trace, and the ranges of torch in them."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Pair]] = []
        self._loading: list[Pair] = []
        self._optimizer: list[Pair] = []

    def add(self, name: str, start_us: float, dur_us: float) -> None:
        """Add a range of the user, whatever its name is."""
        step, pair = _STEP.fullmatch(name), (start_us, start_us + dur_us)
        if step is not None and len(self._steps) < _MOST:
            self._steps.append((int(step[1]), pair))
        elif name.startswith(_LOADING) and len(self._loading) < _MOST:
            self._loading.append(pair)
        elif name.startswith(_OPTIMIZER) and len(self._optimizer) < _MOST:
            self._optimizer.append(pair)

    def finish(self, devices: Iterable[Mapping[Work, Stretches]]) -> list[ProfilerStep]:
        """Return the steps in their order. `devices` has what each device did."""
        if not self._steps:
            return []
        known = list(devices)
        busy = Stretches(sorted(chain.from_iterable(chain.from_iterable(of.values()) for of in known)))
        computed = Stretches(sorted(chain.from_iterable(of.get("compute", ()) for of in known)))
        talked = Stretches(sorted(chain.from_iterable(of.get("communication", ()) for of in known)))
        exposed = Stretches(computed.leave(talked))
        loading, optimizer = Stretches(sorted(self._loading)), Stretches(sorted(self._optimizer))
        return [
            ProfilerStep(
                number=number,
                start_us=pair[0],
                dur_us=pair[1] - pair[0],
                busy_us=_within(busy, pair) if known else None,
                exposed_us=_within(exposed, pair) if known else None,
                loading_us=_within(loading, pair),
                optimizer_us=_within(optimizer, pair),
            )
            for number, pair in sorted(self._steps, key=lambda step: step[1])
        ]


def _within(stretches: Stretches, pair: Pair) -> float:
    return pair[1] - pair[0] - length(stretches.leave([pair]))
