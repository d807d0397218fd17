"""Seeded slow steps with a known cause: the brief of 40 lines names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.commands import Command
from packages.report.tests.simulated import Rollout
from packages.report.tests.steps import MS, close
from packages.report.tests.test_cli import a_run, damage
from stepscope.files.counters import KV_CACHE, PREEMPTIONS
from stepscope.files.manifest import Absent
from stepscope.testing.steps import StepFolder
from stepscope_report import SettingChange, StepReport, step_report
from stepscope_report.brief import LINES, brief_html, brief_markdown, brief_text, step_brief
from stepscope_report.timeline import load_step


def slow_tool(root: Path) -> StepReport:
    """One of 24 calls takes 1.5 s, the others 30 ms."""
    return Rollout(
        slots=2,
        tool_ms=lambda number, turn: 1500 if (number, turn) == (2, 1) else 30,
        tool=lambda number, turn: "search",
    ).report(root)


def straggler_rank(root: Path) -> StepReport:
    """Rank 2 of 4 updates for 900 ms, the others for 500."""
    folder = StepFolder(root)
    folder.process("trainer", owner=True).span("rollout", 0, 100 * MS, role="agent_loop")
    for rank in range(4):
        folder.process("actor", rank).span("update_actor", 100 * MS, (1000 if rank == 2 else 600) * MS)
    return written(folder)


def long_tail(root: Path) -> StepReport:
    """Two of 20 trajectories decode for 900 ms a turn, the others for 50."""
    return Rollout(trajectories=20, decode_ms=lambda number, turn: 900 if number in (7, 8) else 50).report(
        root
    )


def full_kv_cache(root: Path) -> StepReport:
    """The cache of replica 0 fills to 99 %, and 7 requests start again."""
    folder = StepFolder(root)
    folder.process("trainer", owner=True).span("rollout", 0, 1000 * MS, role="agent_loop")
    engine = folder.process("rollout", 0)
    engine.counter(KV_CACHE, {0: 10, 500 * MS: 99}, of="replica 0", unit="%")
    engine.counter(PREEMPTIONS, {0: 2, 500 * MS: 9}, of="replica 0", kind="total")
    return written(folder)


def written(folder: StepFolder) -> StepReport:
    close(folder, 1000 * MS)
    return step_report(load_step(folder.write()))


RULES: dict[Callable[[Path], StepReport], str] = {
    slow_tool: "slow-tools", straggler_rank: "straggler", long_tail: "long-tail",
    full_kv_cache: "full-kv-cache",
}  # fmt: skip


@pytest.mark.parametrize("seed", RULES, ids=lambda seed: seed.__name__)
def test_the_cause_is_the_first_advice(tmp_path: Path, seed: Callable[[Path], StepReport]) -> None:
    (advice,) = (part for part in step_brief(seed(tmp_path)) if part.title == "What to do")
    assert f"[{RULES[seed]}]" in advice.lines[0]


@pytest.mark.parametrize("settings", [0, 5])
def test_a_brief_is_never_longer_however_much_there_is_to_say(tmp_path: Path, settings: int) -> None:
    report = slow_tool(tmp_path)
    change = SettingChange(framework="mine", setting="pool", present=8, suggested=16, direction="higher")
    advice = [msgspec.structs.replace(item, settings=(change,) * settings) for item in report.advice]
    crowded = msgspec.structs.replace(
        report,
        advice=advice * 9,
        breakdown=msgspec.structs.replace(report.breakdown, lines=report.breakdown.lines * 5, opening_ns=MS),
        health=msgspec.structs.replace(
            report.health, complete=False, doubts=("it",), captures=2, user_error="E", errors=()
        ),
    )
    parts = step_brief(crowded, tmp_path, [report, report])
    for text in (brief_text(parts), brief_markdown(parts)):
        assert 35 <= len(text.splitlines()) <= LINES
    assert re.search(r"\d+ more: [a-z-]+, ", brief_text(parts))


def test_names_are_no_markup(folder: StepFolder) -> None:
    folder.process("trainer", owner=True).span("<b>*x*\n# y", 0, 900 * MS, role="reward")
    parts = step_brief(written(folder))
    assert "&lt;b&gt;*x* # y" in brief_html(parts)
    assert r"\<b>\*x\* # y" in brief_markdown(parts)


def test_of_a_run_the_brief_is_of_the_longest_step(tmp_path: Path, command: Command) -> None:
    path = a_run(tmp_path)
    printed = command("report", path, "--brief").out
    assert re.search("of 2 .* 10.0 ms", printed)
    assert f"stepscope report {tmp_path}/step_000002 --full" in printed
    assert not (path / "report.html").exists()


@pytest.mark.parametrize("ended", ["ValueError: no prompt", None], ids=["exception", "death"])
def test_of_a_run_the_failed_step_is_read_first(ended: str | None, tmp_path: Path, command: Command) -> None:
    a_run(tmp_path)
    folder = StepFolder(tmp_path, step=3)
    owner = folder.process("trainer", owner=True)
    owner.error = ended
    if ended is None:
        died = Absent(name="actor[0]", state="missing", reason="OOM", died=True, process="actor_rank0")
        owner.absent.append(died)
    owner.close(5 * MS)
    folder.write()
    code = 0 if ended else 3
    assert command("report", tmp_path, "--brief", code=code).out.startswith("Step 3 ")
    assert "--step 3" in command("report", tmp_path, "--no-html", code=code).err


def test_a_process_that_is_slower_by_less_than_a_fiftieth_of_the_step_is_not_named(tmp_path: Path) -> None:
    for slow_ms, told in ((40, False), (52, True)):
        folder = StepFolder(tmp_path, step=slow_ms)
        owner = folder.process("trainer", owner=True)
        owner.span("train", 0, 2000 * MS)
        owner.close(2000 * MS)
        for rank in range(4):
            worker = folder.process("actor", rank)
            worker.span("reward", 0, (slow_ms if rank == 3 else 2) * MS)
            worker.close(2000 * MS)
        report = step_report(load_step(folder.write()))
        assert ("took 52.0 ms" in brief_text(step_brief(report))) == told


def test_a_brief_of_a_damaged_step_says_so_and_exits_with_3(tmp_path: Path, command: Command) -> None:
    path = a_run(tmp_path, steps=[2])
    damage(path)
    printed = command("report", path, "--brief", "--markdown", code=3).out
    assert printed.startswith("## Step 2 ")
    assert "- Not complete: spans/" in printed
    assert "--full  # all tables" in printed
