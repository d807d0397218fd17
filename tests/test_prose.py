"""Prose that is held to rules: first words, sentences, and the length of decisions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sentences import docstrings, messages, offences, sentences
from tests.tree import ROOT, files
from tools import reference

QUESTIONS = {"What", "Which", "Whose", "Whom", "Who", "How", "Where", "When", "Whether"}
CLEAN = ["benchmarks", "conftest.py", "dev.py", "docs", "examples", "packages", "tests", "tools"]
"""Folders and files that the rule holds for."""


def questions(path: Path) -> list[str]:
    """Return the docstrings of a file that open with a question word, with their places."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(path.read_text())
        if text.split() and text.split()[0].strip(",:;.?") in QUESTIONS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", CLEAN)
def test_docstrings_open_with_a_subject_or_a_verb(place: str) -> None:
    paths = [path for path in files(".py") if path.relative_to(ROOT).is_relative_to(place)]
    assert paths
    assert [line for path in paths for line in questions(path)] == []


def wrong_sentences(path: Path, texts: Iterable[tuple[int, str]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {offence}: {sentence}"
        for line, text in texts
        for sentence in sentences(text)
        for offence in offences(sentence)
    ]


@pytest.mark.parametrize("place", CLEAN)
def test_docstrings_have_no_empty_words(place: str) -> None:
    paths = [path for path in files(".py") if path.relative_to(ROOT).is_relative_to(place)]
    assert paths
    wrong = [line for path in paths for line in wrong_sentences(path, docstrings(path.read_text()))]
    assert not wrong, "\n".join(wrong)


def test_pages_have_no_empty_words() -> None:
    wrong = [line for page in files(".md") for line in wrong_sentences(page, [(1, page.read_text())])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_errors_and_helps_have_no_empty_words() -> None:
    sources = [path for path in files(".py") if "/src/" in path.as_posix()]
    texts = {path: list(messages(path.read_text())) for path in sources}
    assert sum(map(len, texts.values())) > 400
    wrong = [line for path, told in texts.items() for line in wrong_sentences(path, told)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("sentence", "offence"),
    [
        ("It is very slow.", "'very' adds nothing: leave it out, or say what is meant"),
        ("It opens the the file.", "'the' twice"),
    ],
)
def test_an_offence_is_named(sentence: str, offence: str) -> None:
    assert list(offences(sentence)) == [offence]


def test_values_of_a_message_are_code() -> None:
    source = 'raise ConfigError(f"{name} is wrong. Fix: " f"use {other}")\noption(help="Very good.")'
    assert sorted(messages(source)) == [(1, "`X` is wrong. Fix: use `X`"), (2, "Very good.")]


def test_code_links_and_tables_are_not_read_as_prose() -> None:
    skipped = "# very\n\n| very | very |\n\n```\nvery\n```\n\n"
    page = f"See [a page](very.md) and `very`.\nIt ends. `x` is next:\n\n{skipped}* An item.\n"
    assert list(sentences(page)) == ["See a page and X.", "It ends.", "X is next:", "An item."]


def test_docstrings_of_attributes_are_found() -> None:
    source = 'class A:\n    """Class."""\n\n    size: int\n    """How large it is."""\n'
    assert [text for _, text in docstrings(source)] == ["Class.", "How large it is."]


def modules() -> dict[str, Path]:
    """Return the file of each module of our packages, by dotted name."""
    return {
        ".".join(path.parts[path.parts.index("src") + 1 :])
        .removesuffix(".py")
        .removesuffix(".__init__"): path
        for path in files(".py")
        if "/src/stepscope" in path.as_posix()
    }


def entry_points() -> set[str]:
    """Return the groups of entry points that our packages declare or load."""
    sources = [path.read_text() for path in files(".py") if "/src/" in path.as_posix()]
    return {name for source in sources for name in re.findall(r'"(stepscope\.[a-z_]+)"', source)}


def dotted_names(text: str, known: dict[str, Path]) -> Iterator[str]:
    """Yield the dotted names in backticks that begin with one of our packages, or with `_recording`."""
    for name in re.findall(r"`(\w+(?:\.\w+)+)(?:\(.*?\))?`", text):
        full = f"stepscope.{name}" if name.startswith("_recording.") else name
        if full.partition(".")[0] in known:
            yield full


def names_in(path: Path) -> set[str]:
    """Return the names that the file of a module defines, imports or lists."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name():
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name)
            case ast.Constant(value=str(value)):
                found.add(value)
    return found


def exists(name: str, known: dict[str, Path]) -> bool:
    """Return whether a dotted name is a module of ours, or begins with a name in one."""
    owner, rest = name, ""
    while owner not in known:
        owner, _, rest = owner.rpartition(".")
    return not rest or rest in names_in(known[owner])


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("stepscope.files.clock", True),
        ("stepscope.files.clock.read_anchor", True),
        ("stepscope.files.clock.ClockAnchor.wall_ns", True),
        ("stepscope.files.watch", False),
        ("stepscope.files.clock.read_watch", False),
    ],
)
def test_a_dotted_name_is_looked_up(name: str, is_there: bool) -> None:
    assert exists(name, modules()) is is_there


def test_dotted_names_of_ours_in_docstrings_exist() -> None:
    known, groups = modules(), entry_points()
    named = [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for path in known.values()
        for line, text in docstrings(path.read_text())
        for name in dotted_names(text, known)
    ]
    assert named
    assert [
        f"{place}: {name}" for place, name in named if name not in groups and not exists(name, known)
    ] == []


def test_decisions_have_at_most_300_words() -> None:
    lengths = {page.name: len(page.read_text().split()) for page in (ROOT / "docs/decisions").glob("0*.md")}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


NO_PAGES = {
    "CHANGELOG.md",
    "benchmarks/README.md",
    "packages/report/tests/recorded_otel/README.md",
    *(f"docs/reference/{name}.md" for name in reference.PAGES),
}
"""Markdown that is history, measurements, a note on files of tests, or generated to look names up."""


def test_all_documentation_has_at_most_26_000_words() -> None:
    pages = {path.relative_to(ROOT).as_posix(): path for path in files(".md")}
    assert pages.keys() >= NO_PAGES
    # Code and tables count, as with `wc -w`: a reader reads them too.
    words = {name: len(path.read_text().split()) for name, path in pages.items() if name not in NO_PAGES}
    assert sum(words.values()) <= 26_000, sorted(words.items(), key=lambda item: -item[1])[:10]
