"""Whatever lies in a run's folder, commands end well, and neither read nor write outside of it.

`--hypothesis-profile=fuzz --timeout=0 -o faulthandler_timeout=0` tries thousands of damaged folders in place
of a few.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.report.tests.damage import damage
from packages.report.tests.steps import MS
from packages.report.tests.traces import op
from packages.report.tests.whole_run import write_whole_run
from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import Sidecar
from stepscope.files.storage import open_file, read_file, read_record
from stepscope.testing.steps import StepFolder
from stepscope_report.cli.app import run

SECRET = "what-lies-outside"
FOLDERS = 20 if settings().max_examples == 100 else settings().max_examples
"""The number of damaged folders to try: few, unless a profile asks for another number."""
COMMANDS = (
    ("merge", "{step}"),
    ("report", "{run}", "--no-html"),
    ("report", "{step}"),
    ("report", "{run}", "--json"),
    ("ls", "{run}"),
    ("trigger", "list", "{run}"),
    ("trigger", "list", "{run}", "--json"),
    ("validate", "{run}/config.yaml"),
    ("diff", "{step}", "{step}"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_run(tmp_path_factory.mktemp("whole") / "run")


def say(command: Sequence[str]) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(command)
    return code, output.getvalue()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_whole_folder_is_read(whole: Path, tmp_path: Path, command: Sequence[str]) -> None:
    copied = shutil.copytree(whole, tmp_path / "run")
    code, output = say([word.format(run=copied, step=copied / "step_000002") for word in command])
    assert code in (0, 3), output


HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\x07e\u2028f"
"""A colour, a cleared screen (C1), text from right to left, a bell, a line separator."""


def unprintable(text: str) -> set[str]:
    return {char for char in text if not char.isprintable()} - {"\n"}


@pytest.mark.parametrize("command", [*COMMANDS, ("diff", "{step}", "{step}", "--json")], ids=" ".join)
def test_no_command_hands_control_characters_to_the_terminal(tmp_path: Path, command: Sequence[str]) -> None:
    run_folder = tmp_path / HOSTILE
    folder = StepFolder(run_folder)
    driver = folder.process("trainer", owner=True)
    turn = driver.span(HOSTILE, 0, MS, trajectory=HOSTILE, turn=1, attrs={"request_id": HOSTILE})
    driver.span(HOSTILE, 0, None, parent=turn)
    driver.close(MS)
    step = folder.write()
    (run_folder / "config.yaml").write_text(f"steps: '{HOSTILE!r}'\n")
    _, output = say([word.format(run=run_folder, step=step) for word in command])
    assert output
    assert unprintable(output) == set()


@pytest.mark.parametrize("command", ["report", "merge", "ls", "validate"])
def test_a_message_about_a_missing_path_shows_its_control_characters(tmp_path: Path, command: str) -> None:
    code, output = say([command, str(tmp_path / HOSTILE)])
    assert code != 0
    assert unprintable(output) == set()
    assert r"a\x1b[31mb\x9b2Jc\u202ed" in output.replace("\n", "")


@pytest.mark.slow
@given(random=st.randoms(use_true_random=False))
@settings(max_examples=FOLDERS)
def test_a_damaged_folder_ends_no_command_and_leads_none_outside(whole: Path, random: Random) -> None:
    with tempfile.TemporaryDirectory() as above:
        root, outside = Path(above, "run"), Path(above, "outside")
        shutil.copytree(whole, root)
        outside.mkdir()
        secret = outside / "secret.json"
        secret.write_text(json.dumps({"traceEvents": [op(SECRET, 1000, 500)]}))
        files = sorted(path for path in root.rglob("*") if path.is_file())
        for path in random.sample(files, random.choice((1, 1, 2, 4))):
            damage(path, random, secret)
        for command in random.sample(COMMANDS, 2):
            arguments = [word.format(run=root, step=root / "step_000002") for word in command]
            code, text = say(arguments)
            assert code in (0, 1, 2, 3), text
            assert "bug in stepscope" not in text, f"{' '.join(command)}: {text}"
        assert sorted(os.listdir(above)) == ["outside", "run"]
        assert os.listdir(outside) == ["secret.json"]
        for path in (root / "step_000002").glob("timeline*.gz"):
            assert SECRET.encode() not in gzip.decompress(path.read_bytes())


# What a record's name may stand for.


def test_a_pipe_is_no_record_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        open_file(tmp_path / "pipe")


def test_a_device_that_never_ends_is_no_record() -> None:
    with pytest.raises(OSError, match="no regular file"):
        read_file(Path("/dev/zero"))


def test_a_record_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert read_file(path, 11) == b"x" * 11
    with pytest.raises(RecordError, match="more than 10 bytes"):
        read_file(path, 10)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b'{"step": 1e999}', b'{"a": "\\ud800"}'])
def test_a_record_that_is_none_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record"
    path.write_bytes(content)
    with pytest.raises(RecordError):
        read_record(path, Sidecar)


def test_a_run_id_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    process = StepFolder(tmp_path).process("actor", 0).info
    layout, evil = RunLayout(tmp_path), "/../../../etc/passwd"
    paths = [layout.run(evil), layout.uncaptured(process, evil), layout.step(2).part_of(process, evil)]
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in paths)
    assert all(".." not in path.parts for path in paths)


# Configuration.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("roles: &a {x: *a}\n", "there is no 'roles.x.x'"),
        ("steps: " + "[" * 5000, "correct it"),
        ("steps: " + "9" * 5000, "correct it"),
        ("steps: 2020-13-45\n", "correct it: month"),
        ("steps: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("# " + "x" * (1 << 20), "at most 1048576 bytes"),
    ],
    ids=["itself", "deep", "digits", "date", "code", "large"],
)
def test_a_hostile_configuration_is_a_config_error(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        ProfileConfig.from_file(path)


def test_the_lock_beside_the_requests_is_not_written_through_a_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "run"
    outside.write_text("mine")
    root.mkdir()
    (root / ".control.json.lock").symlink_to(outside)
    assert run(["trigger", str(root), "--wait", "0", "--next-run"]) == 1
    assert outside.read_text() == "mine"
