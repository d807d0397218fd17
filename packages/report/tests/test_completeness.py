"""Every command says the same of a step: complete, or not, whatever is damaged or gone."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # the ranks record with it

from packages.report.tests.steps import MS
from stepscope.files.manifest import Absent, Recorded
from stepscope.files.values import AttrValue
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run
from stepscope_report.sections.health import step_health
from stepscope_report.timeline import load_step
from stepscope_report.timeline.model import why_incomplete

MAIN = Path(__file__).parents[2] / "core" / "tests" / "spmd_main.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a step of two ranks, each with spans, counters and a trace of torch."""
    folder = tmp_path_factory.mktemp("recorded")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run([*torchrun, str(MAIN), str(folder)], capture_output=True, timeout=300, check=True)
    return folder / "step_000001"


def one(step: Path, pattern: str) -> Path:
    """Return the first file of rank 1 that fits."""
    return sorted(path for path in step.glob(pattern) if "rank1" in path.name)[0]


def cut(path: Path, keep: int | None = None) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def without_end(path: Path, lines: int = 1) -> None:
    """Cut a file of lines off between two lines."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lines]))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))


def fail(step: Path, kind: str, state: str) -> None:
    part = one(step, "processes/*.json")
    items = json.loads(part.read_bytes())["expected"]
    for item in items:
        if item["kind"] == kind:
            item |= {"state": state, "reason": "it is so"}
    change(part, expected=items)


def drop_spans(step: Path) -> None:
    path = one(step, "spans/*")
    *lines, end = path.read_bytes().splitlines()
    record = json.dumps({**json.loads(end), "dropped": 3}).encode()
    path.write_bytes(b"\n".join([*lines, record, b""]))


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def unlink(files: Iterable[Path]) -> None:
    for path in list(files):
        path.unlink()


TRACES = "traces/*/*.json.gz"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "spans are gone": lambda step: shutil.rmtree(step / "spans"),
    "spans of a rank are gone": lambda step: one(step, "spans/*").unlink(),
    "spans are a dangling link": lambda step: dangle(one(step, "spans/*")),
    "spans are empty": lambda step: cut(one(step, "spans/*"), 0),
    "spans end in a line": lambda step: cut(one(step, "spans/*"), -30),
    "spans end between lines": lambda step: without_end(one(step, "spans/*"), 2),
    "spans are no records": lambda step: one(step, "spans/*").write_bytes(b"\0\n" * 50),
    "spans were dropped": drop_spans,
    "counters are gone": lambda step: one(step, "counters/*").unlink(),
    "counters end between lines": lambda step: without_end(one(step, "counters/*")),
    "a trace is gone": lambda step: one(step, TRACES).unlink(),
    "a trace and its sidecar are gone": lambda step: unlink(step.glob("traces/*/*rank1*")),
    "traces are gone": lambda step: shutil.rmtree(step / "traces"),
    "a trace is a dangling link": lambda step: dangle(one(step, TRACES)),
    "a trace is empty": lambda step: cut(one(step, TRACES), 0),
    "a trace is cut off": lambda step: cut(one(step, TRACES), -200),
    "a sidecar is gone": lambda step: one(step, TRACES + ".meta.json").unlink(),
    "a sidecar is no record": lambda step: one(step, TRACES + ".meta.json").write_bytes(b"{"),
    "parts of the manifest are gone": lambda step: shutil.rmtree(step / "processes"),
    "the part of a rank is gone": lambda step: one(step, "processes/*.json").unlink(),
    "the part of a rank is no record": lambda step: cut(one(step, "processes/*.json"), 100),
    "the part of a rank is of a later version": lambda step: change(one(step, "processes/*.json"), format=99),
    "a rank is gone": lambda step: unlink(step.rglob("*rank1*")),
    "spans are partial": lambda step: fail(step, "spans", "partial"),
    "a trace is missing": lambda step: fail(step, "trace", "missing"),
    "a trace has failed": lambda step: fail(step, "trace", "failed"),
    "a trace is pending": lambda step: fail(step, "trace", "pending"),
}


class Answers:
    """The answers of all commands about a step."""

    def __init__(self, step: Path, capsys: pytest.CaptureFixture[str]) -> None:
        merge = ["merge", str(step), "-o", str(step.parent / "timeline.json.gz")]
        self._capsys = capsys
        self.exits: dict[str, int] = {}
        self.ls = self._run("ls", str(step))
        self.report = self._run("report", str(step), "--no-html", "--full")
        self.brief = self._run("report", str(step), "--brief")
        self._run(*merge)
        (self.row,) = json.loads(self._run("ls", str(step), "--json"))
        (reported,) = json.loads(self._run("report", str(step), "--json"))["steps"]
        self.health = reported["health"]
        self.merged = json.loads(self._run(*merge, "--json"))

    def _run(self, *command: str) -> str:
        self.exits[" ".join((command[0], *command[-1:]))] = run(list(command))
        return " ".join(self._capsys.readouterr().out.split())


def copy_of(recorded: Path, folder: Path) -> Path:
    copied = shutil.copytree(recorded, folder / "run" / "step_000001", symlinks=True)
    for source in recorded.parent.glob("run*.json"):
        shutil.copy(source, copied.parent)
    return Path(copied)


def test_every_command_says_that_a_whole_step_is_complete(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers(copy_of(recorded, tmp_path), capsys)
    assert set(answers.exits.values()) == {0}
    assert (answers.row["complete"], answers.row["state"], answers.row["problems"]) == (True, "ok", [])
    assert answers.health["complete"]
    assert not answers.merged["problems"]
    assert not answers.merged["incomplete"]
    for text in (answers.report, answers.brief):
        assert "Complete: " in text


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_command_says_that_a_damaged_step_is_not_complete(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    step = copy_of(recorded, tmp_path)
    DAMAGE[kind](step)
    says_incomplete(Answers(step, capsys))


def says_incomplete(answers: Answers) -> None:
    assert set(answers.exits.values()) == {3}, answers.exits
    assert not answers.row["complete"]
    assert answers.row["state"] not in ("ok", "skipped")
    told = {*answers.row["problems"], *answers.row["pending"]}
    assert told
    assert told <= set(answers.health["doubts"])  # the report has read the traces too
    assert not answers.health["complete"]
    assert answers.merged["problems"] or answers.merged["incomplete"]
    for text in (answers.report, answers.brief):
        assert "Complete: nothing is missing" not in text
        assert "Not complete" in text


def test_what_only_a_reader_of_traces_sees_is_told_by_those(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = copy_of(recorded, tmp_path)
    trace = one(step, TRACES)
    size = trace.stat().st_size
    text = gzip.decompress(trace.read_bytes())
    trace.write_bytes(gzip.compress(text[: len(text) // 2], compresslevel=0))
    assert trace.stat().st_size > size
    answers = Answers(step, capsys)
    assert {name.partition(" ")[0] for name, code in answers.exits.items() if code} == {"report", "merge"}
    assert "Complete: " not in answers.report + answers.brief
    assert "stepscope ls" not in answers.brief


def test_ls_reads_no_spans_of_a_step_that_has_all(tmp_path: Path) -> None:
    step = StepFolder(tmp_path, step=1)
    trainer = step.process("trainer", owner=True)
    for number in range(1, 100):
        trainer.span("update", 0, number * MS)
    trainer.close(100 * MS)
    path = step.write()
    read: list[int] = []
    assert len(load_step(path, on_read=read.append).spans) == 99
    assert sum(read) == trainer.span_path.stat().st_size  # progress is told in bytes
    read.clear()
    assert load_step(path, on_read=read.append, spans=False).spans == []
    assert read == []


def test_a_step_that_still_ran_and_one_without_its_owner_are_complete_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = StepFolder(tmp_path / "running", step=1)
    running.process("trainer", owner=True).close(10 * MS)
    path = running.write()
    cause = Recorded(trigger="signal", reason="SIGUSR1", running=True)
    (part,) = (path / "processes").iterdir()
    change(part, recorder={"trigger": cause.trigger, "reason": cause.reason, "running": True})
    says_incomplete(Answers(path, capsys))
    orphan = StepFolder(tmp_path / "orphan", step=1)
    orphan.process("actor", 0).close(10 * MS)
    says_incomplete(Answers(orphan.write(), capsys))


def test_workers_without_an_end_or_a_clock_are_complete_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = StepFolder(tmp_path / "killed", step=1)
    killed.process("trainer", owner=True).close(10 * MS)
    killed.process("actor", 0)
    says_incomplete(Answers(killed.write(), capsys))
    apart = StepFolder(tmp_path / "apart", step=1)
    apart.process("trainer", owner=True).close(10 * MS)
    apart.process("actor", 0, host="host-b").close(10 * MS)
    says_incomplete(Answers(apart.write(), capsys))


def test_death_is_among_the_reasons_for_what_a_worker_did_not_leave(folder: StepFolder) -> None:
    driver = folder.process("trainer", owner=True)
    driver.began = {"actor_rank0_a_pid17": "actor[0]", "actor_rank1_a_pid18": "actor[1]"}
    driver.error = "ActorDiedError: The actor died unexpectedly.\n\tclass_name: Trainer\n\tpid: 18\n\tip: ::1"
    driver.close(10 * MS)
    timeline = load_step(folder.write())
    unknown, known = why_incomplete(timeline)
    assert re.match("actor.0.: missing: it began, .* it died", unknown)
    assert known.startswith("actor[1]: missing: its process died: ")
    assert step_health(timeline).lost == ("actor[1]",)


@pytest.mark.parametrize(
    ("fault", "outside"),
    [
        (None, {"trainer 1": "actor update"}),
        ("died", {}),  # the step waited for the dead rank
        ("raised", {}),  # rank 2 failed by itself, and closed its connections by that
        ("entered", {}),
    ],
)
def test_a_rank_outside_of_a_collective_that_timed_out_is_named(
    folder: StepFolder, fault: str | None, outside: dict[str, str]
) -> None:
    ranks = [folder.process("trainer", rank, owner=True) for rank in range(3)]
    for rank, trainer in enumerate(ranks):
        hangs = rank == 1
        top = trainer.span("update", 0, None if hangs else 90 * MS, role="actor")
        waits: dict[str, AttrValue] = {"sequence": 4, "wait": True}
        if not hangs:
            error = "ValueError: boom" if rank and fault == "raised" else "RuntimeError: Timed out"
            attrs = None if rank and fault == "raised" else waits
            trainer.span("all_reduce", 50 * MS, 90 * MS, parent=top, error=error, attrs=attrs)
        elif fault == "entered":
            trainer.span("all_reduce", 60 * MS, None, parent=top, attrs=waits)
        trainer.error = None if hangs else "RuntimeError: Timed out"
        if not hangs or fault != "died":
            trainer.close(90 * MS)
    if fault == "died":
        died = Absent(name="trainer 3", state="missing", reason="it died", died=True, process="trainer_rank3")
        ranks[0].absent.append(died)
    assert step_health(load_step(folder.write())).outside == outside
