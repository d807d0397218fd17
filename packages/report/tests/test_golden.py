"""Merges and reports of the golden steps in `data/`: see `golden.py`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from packages.report.tests.steps import some

MACHINE = r'"vm"|_vm_|"/(tmp|home|root|work)/'


def _golden() -> ModuleType:
    spec = some(importlib.util.spec_from_file_location("golden", Path(__file__).with_name("golden.py")))
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _golden()


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.steps())
def test_merge_and_report_say_what_they_said(name: str) -> None:
    expected = json.loads(golden.expected_path(name).read_text())
    assert golden.seen(golden.steps()[name]) == expected, "golden.py expect"


def test_no_path_or_host_of_the_recording_machine_is_in_them() -> None:
    for path in golden.DATA.rglob("*"):
        assert "_vm_" not in path.name
        if path.suffix in (".json", ".jsonl"):
            assert not re.search(MACHINE, path.read_text()), path
