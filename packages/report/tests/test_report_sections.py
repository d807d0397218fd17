"""The list of sections, and sections of other packages."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from packages.report.tests.pictures import rl_step
from packages.report.tests.steps import printed
from stepscope_report import StepReport, step_report
from stepscope_report.html.step_page import render_step
from stepscope_report.report import SECTIONS
from stepscope_report.sections.advice import RULES
from stepscope_report.timeline import load_step
from tests.tree import ROOT

TOY = """
import msgspec
from stepscope_report.table import Paragraph, TextTable
from stepscope_report.html import tag
from stepscope_report.sections import Section
from stepscope_report.report import HEALTH

def count_spans(sources):
    processes = sources.value_of(HEALTH).processes
    rows = tuple((row.name, str(row.spans)) for row in processes)
    return TextTable("Toy spans", ("process", ">spans"), rows, note=f"step {sources.timeline.step}")

def fail(sources):
    return 1 / 0

spans = Section(name="spans", title="Toy spans", compute=count_spans)
broken = Section(name="broken", title="Broken", compute=fail)
numbers = Section(name="numbers", title="Numbers", compute=lambda sources: TextTable("n", ("n",), ((1,),)))
no_section = 3

class Count(msgspec.Struct):
    spans: int

def draw_count(value, page):
    yield tag("p", f"{value.spans} spans drawn by their own section of step {page.report.step}", id="own")

def say_count(value, report):
    return [Paragraph(f"{value.spans} spans counted, {len(report.stages)} stages")]

def fail_to_draw(value, page):
    return 1 / 0

count = Section(
    name="count", title="Count", compute=lambda sources: Count(len(sources.timeline.spans)),
    terminal=say_count, html=draw_count, page=0,
)
undrawn = Section(name="u", title="Undrawn", compute=count_spans, html=fail_to_draw)
short = Section(name="s", title="Short", compute=lambda sources: TextTable("s", ("a", "b"), (("1",),)))
unescaped = Section(name="e", title="E", compute=count_spans, html=lambda value, page: ["<script>"])
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with report sections on `sys.path`."""
    site = tmp_path / "site"
    metadata = site / "toy_sections-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-sections\nVersion: 1.0\n")
    names = (
        "spans", "broken", "numbers", "no_section", "not_there", "count", "undrawn", "short", "unescaped",
    )  # fmt: skip
    points = "\n".join(f"toy-{name} = toy_sections:{name}" for name in names)
    (metadata / "entry_points.txt").write_text(f"[stepscope.report_sections]\n{points}\n")
    (site / "toy_sections.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "toy_sections", raising=False)
    return site


def test_a_section_fills_the_field_of_its_name() -> None:
    fields = set(StepReport.__struct_fields__)
    assert {section.name for section in SECTIONS} == fields - {
        "format", "step", "run_id", "runs", "opened_ns", "tracer", "added"
    }  # fmt: skip
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


def test_the_docs_explain_each_section_in_the_order_of_the_list() -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    places = []
    for section in SECTIONS:
        if section.title:
            heading = f"\n## {section.title}"
            places.append(page.find(heading if heading in page else f"\n**{section.title}**"))
    assert -1 not in places
    assert places == sorted(places)


def test_the_docs_list_each_rule_of_advice_on_a_step() -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    listed = page.partition("## What to do")[2].partition("\n## ")[0]
    sources = [Path(inspect.getfile(rule)).read_text() for rule in RULES]
    rules = {name for source in sources for name in re.findall(r'rule="([a-z-]+)"', source)}
    assert len(rules) >= len(RULES)
    assert {name for name in rules if f"`{name}`" not in listed} == set()


@pytest.mark.usefixtures("install")
def test_a_section_of_another_package_stands_at_the_end_of_terminal_page_and_json(tmp_path: Path) -> None:
    timeline = load_step(rl_step(tmp_path / "run", ranks=2).write())
    report = step_report(timeline)
    text, page = printed(report, 150), render_step(timeline, report)
    assert text.index("Toy spans") > text.index("Processes")
    assert "step 2" in text[text.index("Toy spans") :]
    assert page.index('id="toy-spans"') > page.index('id="processes"')
    assert page.count("<h2>Toy spans") == 1
    added = {section["name"]: section for section in json.loads(msgspec.json.encode(report))["added"]}
    assert added["toy-spans"]["tables"][0]["columns"] == ["process", ">spans"]
    assert added["toy-spans"]["tables"][0]["rows"][0][0] == "trainer"


@pytest.mark.usefixtures("install")
def test_a_section_that_fails_is_noted_and_breaks_nothing(tmp_path: Path) -> None:
    timeline = load_step(rl_step(tmp_path / "run", ranks=2).write())
    report = step_report(timeline)
    text, page = printed(report, 150), render_step(timeline, report)
    for note in (
        "section toy-broken failed: ZeroDivisionError: division by zero",
        "section toy-no_section failed: TypeError: toy_sections:no_section is a int, and no Section",
        "section toy-not_there failed: AttributeError",
        "section toy-numbers failed: ValidationError",
        "section toy-short failed: ValueError: row 0 of the table s has 1 cell for 2 columns",
    ):
        assert note in text
        assert note in page
    assert "Toy spans" in text
    assert report.health.complete


@pytest.mark.usefixtures("install")
def test_a_section_of_another_package_draws_itself_as_those_inside_do(tmp_path: Path) -> None:
    timeline = load_step(rl_step(tmp_path / "run", ranks=2).write())
    report = step_report(timeline)
    number = len(timeline.spans)
    assert f"{number} spans counted, {len(report.stages)} stages" in printed(report, 150)
    page = render_step(timeline, report)
    drawn = page.index(f"{number} spans drawn by their own section of step 2")
    assert page.index('id="gantt"') < drawn < page.index('id="processes"')
    added = {section["name"]: section for section in json.loads(msgspec.json.encode(report))["added"]}
    assert added["toy-count"]["value"] == {"spans": number}
    assert re.search("toy-undrawn .*ZeroDivisionError", page)
    assert re.search("toy-unescaped .*TypeError", page)
    assert added["toy-undrawn"]["failed"] is None


def test_without_such_a_package_nothing_is_added(tmp_path: Path) -> None:
    assert step_report(load_step(rl_step(tmp_path, ranks=2).write())).added == ()
