"""Imports between the rooms of an engine adapter go one way, and a room's `__init__` is its docstring."""

from __future__ import annotations

import ast

import pytest

from tests.tree import ROOT, imports

ROOMS: dict[str, dict[str, set[str]]] = {
    "stepscope_vllm": {
        "_arming": {"_driving", "_engine_side"},
        "_capture": {"_driving", "_files"},
        "_driving": {"_files", "_engine_side"},
        "_files": {"_engine_side"},
        "_engine_side": set(),
    },
    "stepscope_sglang": {
        "_capture": {"_driving", "_engine_side", "_files"},
        "_files": {"_engine_side"},
        "_driving": {"_engine_side"},
        "_engine_side": set(),
    },
}
"""Adapter -> room -> rooms it may import. Of the modules beside the rooms, each may import `_versions`."""
FOLDERS = {name: ROOT / "packages" / name.replace("stepscope_", "rollout-") for name in ROOMS}


def room_of(module: str, adapter: str) -> str:
    """Return the room of `<adapter>.<room>.<module>`."""
    return module.split(".")[1] if module.startswith(f"{adapter}.") else ""


@pytest.mark.parametrize("adapter", ROOMS)
def test_every_room_has_its_arrows_written_down(adapter: str) -> None:
    inits = (FOLDERS[adapter] / "src" / adapter).glob("*/__init__.py")
    assert {init.parent.name for init in inits} == set(ROOMS[adapter])


@pytest.mark.parametrize("adapter", ROOMS)
def test_rooms_import_what_is_below_them(adapter: str) -> None:
    rooms = ROOMS[adapter]
    wrong = [
        str(entry)
        for entry in imports(FOLDERS[adapter])
        for source, target in [(room_of(entry.module, adapter), room_of(entry.target, adapter))]
        if source in rooms and target and target not in {source, "_versions", *rooms[source]}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("adapter", ROOMS)
def test_the_init_of_a_room_is_its_docstring(adapter: str) -> None:
    for init in (FOLDERS[adapter] / "src" / adapter).glob("*/__init__.py"):
        (node,) = ast.parse(init.read_text()).body
        assert isinstance(node, ast.Expr), init
