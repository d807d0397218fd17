"""`stepscope why` names what was planted, in its first line."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.culprits.hangs import HANGS, Hang, ask, hanging

pytestmark = pytest.mark.slow


PLANTED = [
    pytest.param(hang, id=hang.name, marks=[pytest.mark.needs(hang.needs)] if hang.needs else [])
    for hang in HANGS
]


@pytest.mark.parametrize("hang", PLANTED)
def test_the_culprit_is_named(hang: Hang, tmp_path: Path) -> None:
    with hanging(hang, tmp_path / "run"):
        answer = ask(hang, tmp_path / "run")
    assert answer.is_right, answer.line


ENDED = [planted for planted in PLANTED if planted.id in ("late rank", "ray.get", "blocked event loop")]


@pytest.mark.parametrize("hang", ENDED)
def test_a_terminated_run_keeps_the_name_of_its_culprit(hang: Hang, tmp_path: Path) -> None:
    with hanging(hang, tmp_path / "run", signal.SIGTERM):
        pass
    answer = ask(hang, tmp_path / "run")
    assert answer.is_right, answer.line
