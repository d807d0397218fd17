"""Rules of the house: names, sizes, and nothing of one machine in what is published."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest

import stepscope
from conftest import PROCESS_STATE
from tests.tree import CORE, PACKAGES, ROOT, files, imports

LONG = 500
"""Lines; a longer file says why in its docstring."""

MACHINE_PATH = re.compile(r"(?<![\w./~$}>-])/(?:root|work|home(?!/anna)|Users)/[\w.-]")
"""A path on a user's machine. Anna is invented: tests of `~` use her home."""


def test_no_module_is_named_after_nothing() -> None:
    nothing = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager"}
    named = [path.relative_to(ROOT) for path in files(".py") if path.stem.strip("_") in nothing]
    assert not named


def test_a_long_file_says_why_at_its_top() -> None:
    long = [path for path in files(".py") if path.read_text().count("\n") > LONG]
    silent = [
        path.relative_to(ROOT)
        for path in long
        if not re.search(r"\blines\b|\b(one|this) file\b", docstring(path.read_text()), re.IGNORECASE)
    ]
    assert not silent, "say why it is one file ('... above 400 lines, because ...'), or split it by noun"


def test_the_tree_has_its_folders_and_no_others() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in files() if path.parent != ROOT}
    # a test may have left one
    assert folders == {".ci", ".github", "benchmarks", "docs", "examples", "packages", "tests", "tools"}


def test_no_file_holds_a_path_of_one_machine() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files(".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini", ".sh", ".ci/run")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not offences, "\n".join(offences)


def test_every_module_has_a_docstring_or_is_empty() -> None:
    sources = [path for package in PACKAGES for path in (package / "src").rglob("*.py")]
    bare = [
        path.relative_to(ROOT) for path in sources if path.stat().st_size and not docstring(path.read_text())
    ]
    assert not bare


def docstring(source: str) -> str:
    return ast.get_docstring(ast.parse(source)) or ""


def test_the_package_itself_holds_names_and_nothing_else() -> None:
    body = ast.parse((CORE / "src/stepscope/__init__.py").read_text()).body
    docstring, *rest = body
    assert isinstance(docstring, ast.Expr)
    assert {type(node) for node in rest} <= {ast.ImportFrom, ast.If, ast.Assign, ast.FunctionDef}
    assigned = [ast.unparse(node.targets[0]) for node in rest if isinstance(node, ast.Assign)]
    assert assigned == ["__all__", "_LATER"]
    functions = [node.name for node in rest if isinstance(node, ast.FunctionDef)]
    assert functions == ["__getattr__", "__dir__"]


def test_names_that_are_imported_late_are_the_ones_a_type_checker_sees() -> None:
    body = ast.parse((CORE / "src/stepscope/__init__.py").read_text()).body
    (typed,) = (node for node in body if isinstance(node, ast.If))
    seen = {
        name.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == stepscope._LATER


def test_type_ignores_and_silenced_lints_name_what_they_silence() -> None:
    blanket = re.compile(r"#\s*(type:\s*ignore(?!\[)|noqa(?!:))")
    offences = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files(".py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if blanket.search(line) and path.name != "test_house.py"
    ]
    assert not offences


def test_no_source_imports_mocks() -> None:
    mocks = [str(entry) for package in PACKAGES for entry in imports(package) if "mock" in entry.target]
    assert not mocks


def test_no_module_has_the_name_of_a_function_of_its_package() -> None:
    """Importing the module would put it in the function's place."""
    hidden = [
        f"{path.parent.relative_to(ROOT)}: {node.name}"
        for path in files(".py")
        if path.name == "__init__.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and path.with_name(f"{node.name}.py").exists()
    ]
    assert not hidden


@pytest.mark.parametrize("module", PROCESS_STATE)
def test_the_variables_that_tests_find_as_new_exist(module: str) -> None:
    assert set(PROCESS_STATE[module]) <= vars(import_module(module)).keys()
