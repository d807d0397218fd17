"""Imports between the rooms of `_recording/`: each imports rooms below it, and no modules form a circle.

Imports for types count, and so do those inside functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from tests.tree import CORE, Import, imports, targets

BELOW = {
    "process": set[str](),
    "spans": {"process"},
    "counters": {"spans", "process"},
    "instrument": {"spans", "process"},
    "session": {"counters", "spans", "process"},
    "recorder": {"session", "counters", "spans", "process"},
    "fanout": {"recorder", "session", "instrument", "spans", "process"},
    "capture": {"fanout", "recorder", "session", "instrument", "spans", "process"},
}
"""Room -> the rooms that it may import."""
ROOT = "stepscope._recording."
FOLDER = CORE / "src" / "stepscope" / "_recording"
MODULES = {f"{ROOT}{path.parent.name}.{path.stem}" for path in FOLDER.glob("*/*.py")}


def module_of(target: str) -> str:
    """Return the module that a name stands in, or the module itself."""
    return target if target in MODULES else target.rpartition(".")[0]


INSIDE = [
    item for item in imports(CORE) if item.module.startswith(ROOT) and module_of(item.target) in MODULES
]


def room_of(module: str) -> str:
    return module.removeprefix(ROOT).partition(".")[0]


def test_every_room_has_its_arrows_written_down() -> None:
    assert {room_of(module) for module in MODULES} == set(BELOW)


def test_a_room_imports_the_rooms_below_it() -> None:
    wrong = [item for item in INSIDE if not is_below(item)]
    assert not wrong, "\n".join(map(str, wrong))


def is_below(item: Import) -> bool:
    room, target = room_of(item.module), room_of(item.target)
    return room == target or target in BELOW[room]


def test_no_modules_of_recording_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for item in INSIDE:
        graph.setdefault(item.module, set()).add(module_of(item.target))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(error.args[1])}") from None


def imports_inside_functions() -> Iterator[str]:
    """Yield each import inside a function of `_recording/`, with the line above it. Ray's are left out: it is
    the user's, and imported where it is used.
    """
    for path in sorted(FOLDER.rglob("*.py")):
        lines = path.read_text().splitlines()
        functions = (
            node
            for node in ast.walk(ast.parse("\n".join(lines)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        for node in (inner for function in functions for inner in ast.walk(function)):
            if isinstance(node, ast.Import | ast.ImportFrom) and not is_ray(node):
                yield f"{path.name}:{node.lineno}: {' '.join(lines[node.lineno - 2 : node.lineno])}"


def is_ray(node: ast.Import | ast.ImportFrom) -> bool:
    return all(target.partition(".")[0] == "ray" for target in targets(node))


def test_imports_inside_functions_are_few_and_there_for_import_time() -> None:
    late = sorted(set(imports_inside_functions()))
    assert len(late) <= 18, "\n".join(late)
    assert not [line for line in late if not re.search("# imported here", line, re.IGNORECASE)]
