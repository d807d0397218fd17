"""`stepscope diff`: changes between two steps or two runs, and whether they are within limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import msgspec
import typer
from rich.console import RenderableType

from stepscope.config import StepRange, parse_steps
from stepscope.errors import ConfigError
from stepscope.files.layout import StepLayout, safe
from stepscope.files.run import RunSteps
from stepscope.files.steps import recorded_runs
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import find_run, is_step, of_one_run
from stepscope_report.cli.plain import expect_plain, is_plain, read_plain_steps
from stepscope_report.cli.report import Reports, read_reports
from stepscope_report.diff import Diff, KernelTimes, kernel_diff, kernel_times
from stepscope_report.diff import diff as compare
from stepscope_report.formatting import duration, plain
from stepscope_report.gate import (
    ENOUGH,
    NOISE,
    Check,
    Gate,
    GateSteps,
    Limit,
    check_gate,
    parse_limits,
    read_gate_steps,
)
from stepscope_report.plain import plain_diff
from stepscope_report.terminal import diff_markdown, render_diff
from stepscope_report.terminal_blocks import markdown_table, table
from stepscope_report.timeline import Timeline, Traces
from stepscope_report.timeline.activity.split import by_stage

COLUMNS = ("stage", ">A", ">B", ">change", ">interval", ">limit", ">steps", "verdict")
NO_INTERVAL = (
    f"Too few steps for an interval: {ENOUGH} per side, or {NOISE} uncaptured ones beside them. "
    "Without it, a stage fails whenever it is beyond its limit."
)


def render_gate(gate: Gate) -> RenderableType:
    return table("The gate", COLUMNS, [_row(check) for check in gate.checks], _note(gate))


def gate_markdown(gate: Gate) -> str:
    verdict = "failed" if gate.failed else "cannot tell" if gate.undecided else "passed"
    title = f"**stepscope: {verdict}**"
    return f"{title}\n\n{markdown_table(COLUMNS, [_row(check) for check in gate.checks])}\n\n{_note(gate)}"


def gate_junit(gate: Gate) -> bytes:
    """Return the verdicts as JUnit XML, with a test case for each limit."""
    attributes = {
        "name": "stepscope diff",
        "tests": str(len(gate.checks)),
        "failures": str(sum(check.failed for check in gate.checks)),
        "skipped": str(sum(check.undecided for check in gate.checks)),
    }
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    for check in gate.checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "stepscope.diff", "name": plain(check.stage)}
        )
        if check.failed:
            ElementTree.SubElement(case, "failure", {"message": say_check(check)})
        elif check.undecided:
            ElementTree.SubElement(case, "skipped", {"message": say_check(check)})
        ElementTree.SubElement(case, "system-out").text = say_check(check)
    ElementTree.indent(suites)
    document: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def say_check(check: Check) -> str:
    """Return the check as text: `rollout/generate: 1.00 s > 1.08 s, +8.0 % (+5.1 to +11.0), limit +5.0 %:
    fails`.
    """
    stage, a, b, change, interval, limit, _, verdict = _row(check)
    certainty = interval if check.interval else "no interval"
    return f"{stage}: {a} → {b}, {change} ({certainty}), limit {limit}: {verdict}"


def _row(check: Check) -> tuple[str, ...]:
    low, high = check.interval or (0.0, 0.0)
    steps = f"{check.a_steps}, {check.b_steps}" + (" captured" if check.source == "captured" else "")
    return (
        plain(check.stage),
        duration(round(check.a_seconds * 1e9)),
        duration(round(check.b_seconds * 1e9)),
        "new" if check.change is None else f"{_percent(check.change)} %",
        "none" if check.interval is None else f"{_percent(low)} to {_percent(high)}",
        f"{_percent(check.limit)} %",
        steps,
        _verdict(check),
    )


def _verdict(check: Check) -> str:
    if check.failed:
        return "fails"
    if check.undecided:
        return f"cannot tell: needs about {check.needed_steps:,} steps a side"
    return "passes: no change" if check.changed is False else "passes"


def _note(gate: Gate) -> str:
    note = (
        "interval: 95 % for all lines together. If it contains zero, there may be no change.\n"
        "steps: compared steps of A and of B: those without a profiler, or all if these are too few."
    )
    missing = any(check.interval is None for check in gate.checks)
    if missing:
        note += f"\n{NO_INTERVAL}"
    if undecided := [check for check in gate.checks if check.undecided]:
        note += f"\n{_more_steps(undecided)}"
    return note


def _more_steps(undecided: Sequence[Check]) -> str:
    """Return advice on how to get as many steps as a verdict needs."""
    text = "cannot tell: the interval contains no change as well as a change beyond the limit. "
    if any(check.source == "captured" for check in undecided):
        return (
            text
            + "Record more steps. With stepscope, set save_path, and not record: off, in both runs: then "
            "every step counts, not the captured ones alone."
        )
    return text + "Let both runs take more steps, or raise the limit."


def _percent(part: float) -> str:
    return f"{part * 100:+.1f}"


class Side(msgspec.Struct, frozen=True):
    """The steps that one argument of the command names."""

    option: str
    path: Path
    run: str | None
    steps: tuple[StepRange, ...] | None
    reports: Reports | None = None
    """Reports of the steps. None if no step was captured and only the flight recorder wrote lines."""
    kernels: tuple[KernelTimes, ...] | None = None
    """Times of kernels in the steps' traces. None if the traces were not read."""

    def wants(self, step: int) -> bool:
        return self.steps is None or any(step in part for part in self.steps)


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="Folder of a run, of one step in it, or of other tools' traces."),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with A.")],
    run_a: Annotated[str | None, typer.Option(help="A's run, where several wrote into one folder.")] = None,
    run_b: Annotated[str | None, typer.Option(help="B's run.")] = None,
    steps_a: Annotated[
        str | None, typer.Option(help="Only these steps of run A: 3-7, 10:50:10, every:5.")
    ] = None,
    steps_b: Annotated[str | None, typer.Option(help="Only these steps of run B.")] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(metavar="PERCENT", help="Exit with 1 if the step, or --stage, grew by more."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE/STAGE", help="A pattern of stages, each with its --fail-above, in order."),
    ] = None,
    require_verdict: Annotated[
        bool,
        typer.Option(
            "--require-verdict", help="With --fail-above: exit with 5 if the steps allow no verdict."
        ),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Read the traces too: which operators and kernels grew, by stage and shapes."
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdicts there, as JUnit XML.")
    ] = None,
    step_mark: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="For traces of other tools: the range that is one step."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="As JSON; times in ns, those of the gate in s.")
    ] = False,
) -> None:
    """Show what changed from A to B, stage by stage. A run is compared by the mean of its captured steps."""
    limits = _limits(fail_above or (), stage or (), junit, require_verdict=require_verdict)
    if json and markdown:
        raise typer.BadParameter("--markdown goes without --json")
    if is_plain([a]) or is_plain([b]):
        given = {"--run-a": run_a, "--run-b": run_b, "--kernels": kernels or None}
        expect_plain(a, b, [name for name, value in given.items() if value is not None])
        sides = [
            read_plain_steps(path, steps, option, step_mark)
            for path, steps, option in ((a, steps_a, "--steps-a"), (b, steps_b, "--steps-b"))
        ]
        change: Diff | None = plain_diff(*sides)
        gate = check_gate(sides[0].gate(), sides[1].gate(), limits) if limits else None
        sound = all(side.complete for side in sides)
    else:
        if step_mark is not None:
            raise ConfigError("--step-mark", step_mark, "only of traces of others", "omit it")
        one = read_side("--steps-a", a, run_a, steps_a, gated=bool(limits), kernels=kernels)
        other = read_side("--steps-b", b, run_b, steps_b, gated=bool(limits), kernels=kernels)
        change, gate = compare_sides(one, other, limits)
        sound = _sound(one, other)
        if kernels and change is None:
            screen.warn(
                "--kernels needs captured steps on both sides; one side has only steps of the flight recorder"
            )
    _tell(change, gate, junit, json=json, markdown=markdown)
    if gate is not None and gate.failed:
        raise typer.Exit(Exit.ERROR)
    if gate is not None and gate.undecided and require_verdict:
        raise typer.Exit(Exit.UNDECIDED)
    raise typer.Exit(Exit.OK if sound else Exit.INCOMPLETE)


def _tell(change: Diff | None, gate: Gate | None, junit: Path | None, *, json: bool, markdown: bool) -> None:
    """Print the change and the verdict. Write the verdict to `junit` too, if that is given."""
    if json:
        document = {"format": 1} if change is None else msgspec.to_builtins(change)
        screen.show_json(document if gate is None else {**document, "gate": gate})
    else:
        _show(change, gate, markdown=markdown)
    if junit is not None and gate is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_bytes(gate_junit(gate))


def compare_sides(one: Side, other: Side, limits: Sequence[Limit]) -> tuple[Diff | None, Gate | None]:
    """Return (change, verdict). The change is None if a side has no captured step; the verdict is None
    without limits.

    Raises:
        ConfigError: as for `check_gate`.
    """
    change = None
    if one.reports is not None and other.reports is not None:
        read = one.kernels is not None and other.kernels is not None
        grown = kernel_diff(one.kernels or (), other.kernels or ()) if read else None
        change = compare(one.reports.steps, other.reports.steps, kernels=grown)
    gate = check_gate(_gate_steps(one), _gate_steps(other), limits) if limits else None
    return change, gate


def _limits(
    fail_above: Sequence[str], stages: Sequence[str], junit: Path | None, *, require_verdict: bool
) -> list[Limit]:
    if fail_above:
        return parse_limits(fail_above, stages)
    given = [("--stage", one) for one in stages[:1]]
    given += [("--junit", str(junit))] if junit is not None else []
    given += [("--require-verdict", "given")] if require_verdict else []
    if given:
        raise ConfigError(*given[0], "only with a limit", "add --fail-above 5%")
    return []


def read_side(
    option: str,
    path: Path,
    run: str | None = None,
    steps: str | None = None,
    *,
    gated: bool = False,
    kernels: bool = False,
) -> Side:
    """Return the steps of one side with their reports, and warn of steps that cannot be read.

    Args:
        option: Name of the command's option that gives `steps`, for errors.
        run: Id of the run, if several runs wrote into the folder. None for the last one.
        steps: The steps to use, as ranges. None for all.
        gated: True if steps that the flight recorder wrote are enough.
        kernels: True to read the traces too.

    Raises:
        CommandError: there are no such steps, or none can be read.
        ConfigError: `steps` is no range, or names no step.
    """
    if steps is not None and is_step(path):
        fix = f"omit it, or give the run's folder: {path.parent}"
        raise ConfigError(option, steps, "only for a run", fix)
    side = Side(option, path, run, None if steps is None else parse_steps(steps, option))
    recorded = recorded_runs(path) if gated else {}
    try:
        chosen = _found(side)
    except (CommandError, ConfigError):
        if recorded:
            return side
        raise
    newest = next((name for name, start_ns in recorded.items() if start_ns > chosen.opened_ns), None)
    if run is None and newest not in (None, safe(chosen.run_id or "")):
        screen.say(
            f"{path}: only the flight recorder's steps, because the run that recorded last captured none"
        )
        return side
    times = list[KernelTimes]()

    def add_times(step: StepLayout, timeline: Timeline, traces: Traces) -> None:
        times.append(kernel_times(by_stage(step.root, timeline, traces.activities)))

    reports = read_reports(list(chosen.steps.values()), chosen.run_id, traces=kernels, on_traces=add_times)
    for step, why in reports.unreadable.items():
        screen.warn(f"{step}: {why}")
    for report in reports.steps:
        for problem in () if report.traces is None else report.traces.problems:
            screen.warn(f"{problem.file}: {problem.what}")
    return msgspec.structs.replace(side, reports=reports, kernels=tuple(times) if kernels else None)


def _found(side: Side) -> RunSteps:
    if is_step(side.path):
        return RunSteps(side.run, {0: StepLayout(side.path)}, {}, 0)
    steps = find_run(side.path)
    wanted = {number: layout for number, layout in steps.items() if side.wants(number)}
    if not wanted:
        asked, captured = ",".join(map(str, side.steps or ())), ", ".join(map(str, steps))
        raise ConfigError(side.option, asked, f"captured steps: {captured}", "name some of these")
    return of_one_run(side.path, wanted, side.run)


def _gate_steps(side: Side) -> GateSteps:
    reports = () if side.reports is None else side.reports.steps
    if reports:
        run = reports[0].run_id
    else:
        run = next(iter(recorded_runs(side.path)), "") if side.run is None else side.run
    whole = not is_step(side.path)
    folder = side.path if whole else side.path.absolute().parent
    return read_gate_steps(folder, run, reports, side.wants, whole=whole)


def _show(change: Diff | None, gate: Gate | None, *, markdown: bool) -> None:
    if markdown:
        verdict = None if gate is None else gate_markdown(gate)
        account = None if change is None else diff_markdown(change)
        screen.show_unwrapped("\n\n".join(filter(None, (verdict, account))))
        return
    if change is not None:
        screen.show(render_diff(change))
    if gate is not None:
        screen.show(render_gate(gate))


def _sound(*sides: Side) -> bool:
    read = [side.reports for side in sides if side.reports is not None]
    return all(not one.unreadable and all(step.health.complete for step in one.steps) for one in read)
