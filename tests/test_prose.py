"""Prose that is held to rules: first words, sentences, and the length of decisions."""

from __future__ import annotations

from collections.abc import Iterable
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
