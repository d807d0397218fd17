"""Fixtures of the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.report.tests.cases import Case
from stepscope.testing.steps import StepFolder


@pytest.fixture
def folder(tmp_path: Path) -> StepFolder:
    """Return a captured step without a process."""
    return StepFolder(tmp_path)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Return a step that needs no advice."""
    return Case(tmp_path)
