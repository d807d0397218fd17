"""Keys of operators by name and by the shapes of their inputs, in a trace that has shapes."""

from __future__ import annotations

from collections.abc import Container

KEPT = 4096
"""Operators by shapes that one trace keeps. Shapes beyond these count together."""
OTHERS = "other shapes"
NONE = b"[]"
"""Shapes of an operator without inputs."""
_TEXT = 160
"""Characters of shapes that are kept: an operator on a list of tensors has thousands."""
_SEPARATOR = "\0"


def operator_key(name: str, dims: bytes, known: Container[str], number: int) -> str:
    """Return the key of an operator with inputs of these shapes.

    Args:
        dims: The shapes as the trace has them, in JSON.
        known: The keys so far, of which there are `number`.
    """
    shapes = bytes(dims)
    if shapes == NONE:
        return name
    text = shapes.decode(errors="replace")
    key = f"{name}{_SEPARATOR}{text if len(text) <= _TEXT else f'{text[:_TEXT]} ...'}"
    return key if number < KEPT or key in known else f"{name}{_SEPARATOR}{OTHERS}"


def name_and_shapes(key: str) -> tuple[str, str]:
    """Return the two parts of a key. Shapes are empty where the trace has none."""
    name, _, shapes = key.partition(_SEPARATOR)
    return name, shapes
