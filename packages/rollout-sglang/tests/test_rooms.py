"""Imports between the rooms of the adapter go one way, and a room's `__init__` is its docstring."""

from __future__ import annotations

import ast

import pytest

from tests.tree import ROOT, imports

PACKAGE = ROOT / "packages" / "rollout-sglang"
MAY_IMPORT: dict[str, set[str]] = {
    "_capture": {"_driving", "_engine_side", "_files"},
    "_files": {"_driving"},
    "_driving": {"_engine_side"},
    "_engine_side": set(),
}
"""Room -> rooms it may import. Of the modules beside the rooms, each may import `_versions`."""


def room_of(module: str) -> str:
    """Return the room of `stepscope_sglang.<room>.<module>`."""
    return module.split(".")[1] if module.startswith("stepscope_sglang.") else ""


def test_every_room_has_its_arrows_written_down() -> None:
    rooms = {path.parent.name for path in (PACKAGE / "src" / "stepscope_sglang").glob("*/__init__.py")}
    assert rooms == set(MAY_IMPORT)


def test_rooms_import_what_is_below_them() -> None:
    between = [(entry, room_of(entry.module), room_of(entry.target)) for entry in imports(PACKAGE)]
    wrong = [
        str(entry)
        for entry, source, target in between
        if source in MAY_IMPORT and target and target not in {source, "_versions", *MAY_IMPORT[source]}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_the_init_of_a_room_is_its_docstring(room: str) -> None:
    (node,) = ast.parse((PACKAGE / "src" / "stepscope_sglang" / room / "__init__.py").read_text()).body
    assert isinstance(node, ast.Expr)
