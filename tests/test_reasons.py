"""Reasons are for people: no logic of the packages reads one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.sentences import statements
from tests.tree import PACKAGES, ROOT

_TEXT = {"startswith", "endswith", "find", "index", "count", "partition", "split", "match", "search"}


def readers(source: str) -> Iterator[int]:
    """Yield the lines in which a `.reason`, or a name that was assigned one, decides something."""
    if ".reason" not in source:
        return
    tree = ast.parse(source)
    for scope in statements(tree):
        names: set[str] = set()
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {name for node in statements(scope) for name in assigned(node)}
        for node in ast.walk(scope) if names or scope is tree else ():
            yield from (part.lineno for part in deciding(node) if holds_reason(part, names))


def assigned(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        yield from (at.id for at, value in pairs if isinstance(at, ast.Name) and is_reason(value))


def deciding(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions whose value `node` decides by."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield from operands(node.test)
    elif isinstance(node, ast.comprehension):
        yield from (part for test in node.ifs for part in operands(test))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
        yield from (node.func.value, *node.args)


def operands(test: ast.expr) -> list[ast.expr]:
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in operands(value)]
    return operands(test.operand) if isinstance(test, ast.UnaryOp) else [test]


def holds_reason(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.BoolOp):  # item.reason or ""
        return any(holds_reason(value, names) for value in node.values)
    return is_reason(node) or (isinstance(node, ast.Name) and node.id in names)


def is_reason(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "reason"


@pytest.mark.parametrize(
    "source",
    [
        "if item.reason == 'x': pass",
        "found = [i for i in items if 'x' in i.reason]",
        "ok = (item.reason or '').endswith('x')",
        "if a and not item.reason: pass",
        "found = [i for i in items if i.reason]",
        "def f():\n    name, reason = item.name, item.reason\n    return 1 if reason else 2",
    ],
)
def test_a_reader_of_a_reason_is_noticed(source: str) -> None:
    assert list(readers(source))


@pytest.mark.parametrize(
    "source", ["said = f'{item.name}: {item.reason}'", "x = item.reason or ''", "ok = item.state == 'ok'"]
)
def test_a_reason_may_be_shown(source: str) -> None:
    assert not list(readers(source))


def test_no_logic_reads_a_reason() -> None:
    sources = [path for package in PACKAGES for path in sorted((package / "src").rglob("*.py"))]
    comparisons = {
        f"{path.relative_to(ROOT)}:{line}" for path in sources for line in readers(path.read_text())
    }
    assert not comparisons, "compare a state, a kind or `pending`: a reason is for people"
