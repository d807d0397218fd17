"""Whatever lies in a run's folder, commands end well, and neither read nor write outside of it.

`--hypothesis-profile=fuzz` tries thousands of damaged folders in place of a few.
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

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.core.tests.damage import damage
from packages.core.tests.test_reader_nsys import tables
from packages.core.tests.test_reader_nsys import write as write_export
from packages.core.tests.traces import event, kernel, op
from stepscope.cli.app import run
from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.reading import open_file, read_file, read_record
from stepscope.files.requests import Answer, Control, Listening, Request
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, FakeProcess, StepFolder

MS = 1_000_000
SECRET = "what-lies-outside"
FOLDERS = 20 if settings().max_examples == 100 else settings().max_examples
"""How many damaged folders are tried: few, unless a profile asks for another number."""
COMMANDS = (
    ("merge", "{step}"),
    ("merge", "{step}", "--format", "perfetto"),
    ("report", "{run}", "--no-html"),
    ("report", "{step}"),
    ("report", "{run}", "--json"),
    ("ls", "{run}"),
    ("trigger", "{run}", "--status"),
    ("trigger", "{run}", "--status", "--json"),
    ("validate", "{run}/config.yaml"),
    ("diff", "{step}", "{step}"),
)
CONFIG = """
save_path: out
steps: [2, "10:50:10"]
roles: {actor: {ranks: [0, 8]}, "*": {ranks: first}}
torch: {activities: [cpu], schedule: {active: 2}}
budget: {seconds: 3}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one step and a file of every kind that is read."""
    root = tmp_path_factory.mktemp("whole") / "run"
    folder = StepFolder(root)
    actor, ref = folder.process("actor", 0, owner=True), folder.process("ref", 1, skew_ns=MS, host="host-b")
    for process in (actor, ref):
        work = process.span("work", MS, 20 * MS)
        attrs: dict[str, str | int | float | bool | None] = {"request_id": "r", "tokens": 5}
        process.span("turn", 2 * MS, 9 * MS, parent=work, trajectory="t", turn=1, attrs=attrs)
        process.span("never", 3 * MS, None)
        process.close(30 * MS)
    actor.measures(ref, 4 * MS, uncertainty_ns=1000)
    step = folder.write()
    events = [op("aten::mm", 1000, 500), kernel("gemm", 1200, 300), event("nccl", "kernel", 2000, 100)]
    ends = [
        {"ph": phase, "id": 1, "pid": 1, "tid": 1, "ts": 1000 + at, "cat": "ac2g", "name": "ac2g", "bp": "e"}
        for phase, at in (("s", 0), ("f", 200))
    ]
    fields = {"baseTimeNanoseconds": OPENED_NS, "distributedInfo": {"rank": 0, "world_size": 2}}
    trace = json.dumps({**fields, "traceEvents": [*events, *ends]}).encode()
    put(step, "traces/actor/a.json", actor, trace)
    put(step, "traces/ref/b.json.gz", ref, gzip.compress(trace))
    exported = write_export(root / "export.sqlite", tables())
    put(step, "traces/actor/c.sqlite", actor, exported.read_bytes())
    exported.unlink()
    layout = RunLayout(root)
    asked = Request(id="0123abcd", steps="next", created_ns=1, expires_ns=2**61)
    layout.control.write_bytes(msgspec.json.encode(Control(requests=[asked])))
    layout.listeners.mkdir()
    answers = {"0123abcd": Answer(state="heard", steps=[1])}
    hears = Listening(host="h", pid=1, role="actor", rank=0, since_ns=1, step=1, answers=answers)
    layout.listener("h", 1).write_bytes(msgspec.json.encode(hears))
    (root / "run.json").write_text('{"format": 1, "run_id": "run1"}')
    (root / "config.yaml").write_text(CONFIG)
    return root


def put(step: Path, name: str, process: FakeProcess, data: bytes) -> None:
    """A trace and its sidecar."""
    path, info = step / name, process.info
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    artifact = Artifact(
        path=name, kind="trace", tool="t", role=info.role, rank=info.rank, host=info.host, size_bytes=1
    )
    said = Sidecar(
        step=2,
        run_id="run1",
        artifact=artifact,
        process=info.key,
        opened=process.anchor(0),
        closed=process.anchor(30 * MS),
    )
    sidecar_of(path).write_bytes(msgspec.json.encode(said))


def say(command: Sequence[str]) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(command)
    return code, said.getvalue()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_whole_folder_is_read(whole: Path, tmp_path: Path, command: Sequence[str]) -> None:
    copied = shutil.copytree(whole, tmp_path / "run")
    code, said = say([word.format(run=copied, step=copied / "step_000002") for word in command])
    assert code in (0, 3), said


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
            said = [word.format(run=root, step=root / "step_000002") for word in command]
            code, text = say(said)
            assert code in (0, 1, 2, 3), text
            assert "Nobody expected" not in text, f"{' '.join(command)}: {text}"
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


def aliases(depth: int) -> str:
    """`depth` lines that stand for 2**depth values."""
    lines = ["&a0 [x, x]", *(f"&a{each} [*a{each - 1}, *a{each - 1}]" for each in range(1, depth))]
    return f"npu: {{extra: {{host_sys: [{', '.join(lines)}]}}}}\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (aliases(26), "at most 100000 values"),
        ("roles: &a {x: *a}\n", "at most 100000 values"),
        ("steps: " + "[" * 5000, "correct it"),
        ("steps: " + "9" * 5000, "correct it"),
        ("steps: 2020-13-45\n", "correct it: month"),
        ("steps: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("# " + "x" * (1 << 20), "at most 1048576 bytes"),
    ],
    ids=["aliases", "itself", "deep", "digits", "date", "code", "large"],
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
    assert run(["trigger", str(root), "--wait", "0"]) == 1
    assert outside.read_text() == "mine"
