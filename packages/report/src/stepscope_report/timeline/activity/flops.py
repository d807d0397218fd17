"""Floating-point operations of a torch trace: matrix products and attention, from the shapes of their inputs.

torch writes shapes into a trace (with `record_shapes` or `with_flops`), but never its own FLOP counts. The
formulas are those of `torch.utils.flop_counter`. A multiplication and an addition count as two operations.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TypeAlias

import msgspec

SHAPES = b'"Input Dims"'
"""Name of the argument with an operator's shapes, as it is written in a trace."""

_Shapes: TypeAlias = list[list[int]]
_decode = msgspec.json.Decoder(list[object]).decode


def _product(shapes: _Shapes) -> int:
    """Return the FLOPs of a matrix product, or of a batch of them."""
    left, right = shapes
    return 2 * prod(left) * right[-1]


def _attention(shapes: _Shapes) -> int:
    """Return the FLOPs of attention, which has two products. By convention, a causal mask saves no FLOPs."""
    query, key, value = shapes
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(shapes: _Shapes) -> int:
    """Return the FLOPs of the gradient of attention: five products, one of which recomputes the scores."""
    _, query, key, value = shapes
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_FLASH = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_FORMULAS: Mapping[str, tuple[slice, Callable[[_Shapes], int]]] = {
    "aten::mm": (slice(0, 2), _product),
    "aten::bmm": (slice(0, 2), _product),
    "aten::_scaled_mm": (slice(0, 2), _product),
    "aten::addmm": (slice(1, 3), _product),
    "aten::baddbmm": (slice(1, 3), _product),
    **{f"aten::_scaled_dot_product_{kind}": (slice(0, 3), _attention) for kind in _FLASH},
    **{f"aten::_scaled_dot_product_{kind}_backward": (slice(0, 4), _attention_backward) for kind in _FLASH},
}
"""{operator: (indices of the formula's inputs, formula)}. No operator in this table calls another operator in
it, so nothing is counted twice."""


class Flops(msgspec.Struct, frozen=True):
    """FLOPs of those operators in a trace that have a formula, in order of the operators' starts."""

    pairs: bytes = b""
    """Start in us and FLOPs of each operator, packed as doubles."""

    @property
    def counts(self) -> Sequence[float]:
        return memoryview(self.pairs).cast("d")[1::2]

    def between(self, first_us: float, last_us: float) -> float:
        """Return the FLOPs of the operators that began from `first_us` until before `last_us`."""
        starts_us = memoryview(self.pairs).cast("d")[::2]
        first, last = bisect_left(starts_us, first_us), bisect_left(starts_us, last_us)
        return sum(self.counts[first:last])


class FlopCounter:
    """Collector of the FLOPs of operators, which may come in any order."""

    def __init__(self) -> None:
        self._starts_us, self._counts = array("d"), array("d")

    def add(self, name: str, start_us: float, dims: bytes) -> None:
        """Count an operator if it has a formula, and the formula accepts its shapes."""
        inputs, formula = _FORMULAS.get(name, (None, None))
        if inputs is None or formula is None:
            return
        try:
            shapes = msgspec.convert(_decode(dims)[inputs], _Shapes)
            count = formula(shapes)
        except (msgspec.MsgspecError, ValueError, IndexError):  # an operator of this name with other inputs
            return
        self._starts_us.append(start_us)
        self._counts.append(float(count))

    def in_order(self) -> Flops:
        """Return the counted operators in order of their starts. In a file, operators of several
        threads are mixed.
        """
        pairs = sorted(zip(self._starts_us, self._counts, strict=True))
        return Flops(array("d", chain.from_iterable(pairs)).tobytes())
