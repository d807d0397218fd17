"""Steps in a trace, each with what ran in it.

They are the ranges that the user named; else `ProfilerStep#N`, which torch's profiler writes; else the times
between the ends of the optimizer's steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain, pairwise

from stepscope_report.timeline.activity.content import ProfilerStep, Work
from stepscope_report.timeline.activity.intervals import Cover, Pair, Stretches, length

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_FORWARD = re.compile(r"(?!.*backward).*forward", re.IGNORECASE)
_BACKWARD = re.compile(r"(?!.*forward).*backward", re.IGNORECASE)
BACKWARD = "autograd::engine::evaluate_function"
"""Beginning of the names of operators that torch's backward runs."""
_LOADING, _OPTIMIZER = "enumerate(DataLoader)#", "Optimizer.step#"
_MOST = 1 << 16
"""Largest number of ranges of each kind that are kept of a trace."""


class ProfilerSteps:
    """The steps of one trace, and the ranges of torch in them."""

    def __init__(self, mark: str | None = None) -> None:
        """Args: mark: Name of the ranges that are steps, with `*` and `?` for any characters, or None."""
        self._mark = mark
        self._ends: dict[str, list[Pair]] = defaultdict(list)
        """Steps of each optimizer."""
        self._forward, self._backward, self._h2d = Cover(), Cover(), Cover()
        self._steps: list[tuple[int, Pair]] = []
        self._loading: list[Pair] = []
        self._optimizer: list[Pair] = []

    def add(self, name: str, start_us: float, dur_us: float) -> None:
        """Add a range of the user, whatever its name is."""
        step, pair = _STEP.fullmatch(name), (start_us, start_us + dur_us)
        if self._mark is not None and fnmatchcase(name, self._mark) and len(self._steps) < _MOST:
            self._steps.append((-1, pair))
        elif step is not None and self._mark is None and len(self._steps) < _MOST:
            self._steps.append((int(step[1]), pair))
        elif name.startswith(_LOADING) and len(self._loading) < _MOST:
            self._loading.append(pair)
        elif name.startswith(_OPTIMIZER) and len(self._optimizer) < _MOST:
            self._optimizer.append(pair)
            self._ends[name].append(pair)
        elif _FORWARD.match(name):
            self._forward.add(*pair)
        elif _BACKWARD.match(name):
            self._backward.add(*pair)

    def add_backward(self, start_us: float, dur_us: float) -> None:
        """Add an operator of torch's backward."""
        self._backward.add(start_us, start_us + dur_us)

    def add_copy(self, start_us: float, dur_us: float) -> None:
        """Add a copy from the host to a device."""
        self._h2d.add(start_us, start_us + dur_us)

    def _numbered(self) -> list[tuple[int, Pair]]:
        """Return the steps with their numbers; those without a number count from 0."""
        if self._steps:
            ordered = sorted(self._steps, key=lambda step: step[1])
            return [(at if number < 0 else number, pair) for at, (number, pair) in enumerate(ordered)]
        if self._mark is not None or not self._ends:
            return []
        calls: list[Pair] = max(self._ends.values(), key=len)
        return list(enumerate(pairwise(end for _, end in sorted(calls)), 1))

    def finish(self, devices: Iterable[Mapping[Work, Stretches]]) -> list[ProfilerStep]:
        """Return the steps in their order. `devices` has what each device did."""
        steps = self._numbered()
        if not steps:
            return []
        known = list(devices)
        busy = Stretches(sorted(chain.from_iterable(chain.from_iterable(of.values()) for of in known)))
        computed = Stretches(sorted(chain.from_iterable(of.get("compute", ()) for of in known)))
        talked = Stretches(sorted(chain.from_iterable(of.get("communication", ()) for of in known)))
        exposed = Stretches(computed.leave(talked))
        forward, backward, h2d = (some.stretches() for some in (self._forward, self._backward, self._h2d))
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
                forward_us=_within(forward, pair) if forward else None,
                backward_us=_within(backward, pair) if backward else None,
                h2d_us=_within(h2d, pair) if h2d else None,
            )
            for number, pair in steps
        ]


def _within(stretches: Stretches, pair: Pair) -> float:
    return pair[1] - pair[0] - length(stretches.leave([pair]))
