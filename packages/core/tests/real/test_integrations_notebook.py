"""The notebook of the examples runs, and its stored outputs are those that it has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.tree import ROOT

NOTEBOOK = ROOT / "examples" / "read_a_step.ipynb"


@pytest.fixture(scope="module")
def stored() -> Any:
    """Return the notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the notebook after a run in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    path = os.pathsep.join([str(command_folder(folder)), os.environ["PATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, resources=resources, record_timing=False).execute()
    return notebook


def command_folder(folder: Path) -> Path:
    """Return a folder with the command `stepscope` of this Python."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "stepscope").write_text(f'#!/bin/sh\nexec {sys.executable} -m stepscope "$@"\n')
    (programs / "stepscope").chmod(0o755)
    return programs


def printed(notebook: Any) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.text for output in cell.outputs) for cell in cells]


def test_its_stored_outputs_are_those_of_a_run(stored: Any, executed: Any) -> None:
    fix = (
        "run `jupyter execute --inplace examples/read_a_step.ipynb` and read the text between the cells again"
    )
    assert printed(stored) == printed(executed), fix


def test_every_question_has_an_output(stored: Any) -> None:
    assert [bool(text) for text in printed(stored)] == [False, *[True] * 6]


def test_its_stored_outputs_name_no_machine_and_no_error(stored: Any) -> None:
    outputs = [output for cell in stored.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream"}
    assert {output.name for output in outputs} == {"stdout"}
