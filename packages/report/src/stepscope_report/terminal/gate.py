"""The gate for terminals, as Markdown and as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree

from rich.console import RenderableType

from stepscope_report.formatting import duration, plain
from stepscope_report.gate.gate import Check, Gate
from stepscope_report.gate.interval import ENOUGH, NOISE
from stepscope_report.terminal.layout import markdown_table, table

COLUMNS = ("stage", ">A", ">B", ">change", ">interval", ">limit", ">steps", "verdict")
NO_INTERVAL = (
    f"Too few steps for an interval: {ENOUGH} per side, or {NOISE} uncaptured ones beside them. "
    "Without it, a stage fails whenever it is beyond its limit."
)


def render_gate(gate: Gate) -> RenderableType:
    return table("The gate", COLUMNS, [_row(check) for check in gate.checks], _note(gate))


def gate_markdown(gate: Gate) -> str:
    title = f"**stepscope: {'failed' if gate.failed else 'passed'}**"
    return f"{title}\n\n{markdown_table(COLUMNS, [_row(check) for check in gate.checks])}\n\n{_note(gate)}"


def gate_junit(gate: Gate) -> bytes:
    """Return JUnit XML: a test case for each limit."""
    failures = sum(check.failed for check in gate.checks)
    attributes = {"name": "stepscope diff", "tests": str(len(gate.checks)), "failures": str(failures)}
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    for check in gate.checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "stepscope.diff", "name": plain(check.stage)}
        )
        if check.failed:
            ElementTree.SubElement(case, "failure", {"message": say_check(check)})
        ElementTree.SubElement(case, "system-out").text = say_check(check)
    ElementTree.indent(suites)
    document: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def say_check(check: Check) -> str:
    """Return `rollout/generate: 1.00 s > 1.08 s, +8.0 % (+5.1 to +11.0), limit +5.0 %: fails`."""
    stage, a, b, change, interval, limit, _, verdict = _row(check)
    certainty = interval if check.interval else "no interval"
    return f"{stage}: {a} > {b}, {change} ({certainty}), limit {limit}: {verdict}"


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
    return "passes: no change" if check.changed is False else "passes"


def _note(gate: Gate) -> str:
    note = (
        "interval: 95 % for all lines together; with zero in it, nothing is called a change.\n"
        "steps: of A and B; those of runs without a profiler, if there are enough."
    )
    missing = any(check.interval is None for check in gate.checks)
    return f"{note}\n{NO_INTERVAL}" if missing else note


def _percent(part: float) -> str:
    return f"{part * 100:+.1f}"
