"""The command `stepscope` as tests run it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from stepscope_report.cli import run


class Printed(NamedTuple):
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """Runs `stepscope` in this process and asks for its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> Printed:
        """Return what it printed since the last call."""
        assert run([str(word) for word in words]) == code
        return Printed(*self._capsys.readouterr())
