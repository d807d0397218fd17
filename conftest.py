"""Leaves out tests that need torch or Ray where these are not installed, and says which."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ABSENT = {name for name in ("torch", "ray") if find_spec(name) is None}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and needed_at_the_top(collection_path) & ABSENT:
        return True
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        if mark.args[0] in ABSENT:
            pytest.skip(f"needs {mark.args[0]}")


def pytest_report_header(config: pytest.Config) -> str | None:
    if not ABSENT:
        return None
    folders = config.getini("testpaths")
    files = [file for folder in folders for file in config.rootpath.glob(f"{folder}/test_*.py")]
    left_out = [str(file.relative_to(config.rootpath)) for file in files if needed_at_the_top(file) & ABSENT]
    return f"not installed: {', '.join(sorted(ABSENT))}; left out: {', '.join(left_out) or 'nothing'}"


@cache
def needed_at_the_top(file: Path) -> set[str]:
    """What of torch and Ray the module imports, outside of functions."""
    body = ast.parse(file.read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} & {"torch", "ray"}
