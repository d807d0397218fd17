"""Prose that is held to rules: the first words of docstrings, and the length of decisions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tree import ROOT, files

QUESTIONS = {"What", "Which", "Whose", "Whom", "Who", "How", "Where", "When", "Whether"}
CLEAN = ["benchmarks", "conftest.py", "dev.py", "docs", "examples", "packages", "tests"]
"""Folders and files that the rule holds for."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, of attributes too."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        for child in node.body if isinstance(node, owners) else []:
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text


def questions(path: Path) -> list[str]:
    """Return the docstrings of a file that open with a question word, with their places."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(path.read_text())
        if text.split() and text.split()[0].strip(",:;.?") in QUESTIONS
    ]


@pytest.mark.parametrize("place", CLEAN)
def test_docstrings_open_with_a_subject_or_a_verb(place: str) -> None:
    paths = [path for path in files(".py") if path.relative_to(ROOT).is_relative_to(place)]
    assert paths, f"{place} has no Python file"
    assert [line for path in paths for line in questions(path)] == []


def test_docstrings_of_attributes_are_found() -> None:
    source = 'class A:\n    """Class."""\n\n    size: int\n    """How large it is."""\n'
    assert [text for _, text in docstrings(source)] == ["Class.", "How large it is."]


def test_decisions_have_at_most_300_words() -> None:
    lengths = {page.name: len(page.read_text().split()) for page in (ROOT / "docs/decisions").glob("0*.md")}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"[A-Za-z0-9][\w'.-]*")


def test_all_documentation_has_at_most_25_000_words() -> None:
    pages = [path for path in files(".md") if path.name != "CHANGELOG.md" and ".github" not in path.parts]
    words = {path.relative_to(ROOT): len(WORD.findall(CODE.sub("", path.read_text()))) for path in pages}
    assert sum(words.values()) <= 25_000, sorted(words.items(), key=lambda item: -item[1])[:10]
