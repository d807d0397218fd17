from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from packages.report.tests.pictures import HOSTILE, MS, rl_step
from packages.report.tests.steps import Row, a_step, close, printed
from packages.report.tests.traces import add_trace, event, kernel, memory, op
from stepscope.files.manifest import Absent
from stepscope.testing.steps import StepFolder
from stepscope_report import StepReport, step_report
from stepscope_report.html import colour_of
from stepscope_report.html.run_page import RunStep, render_run
from stepscope_report.html.step_page import DOCS, WORDS, legend_of_words, render_step
from stepscope_report.html.timecharts import ticks
from stepscope_report.timeline import load_step, load_traces
from tests.tree import ROOT

VOID = {"meta", "link", "br", "img"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}


class Page(HTMLParser):
    """A page as a browser sees it: tags with their attributes; marks and text by the id of their section."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.marks: dict[str | None, int] = {}
        self.text: dict[str | None, str] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def section(self) -> str | None:
        return next((name for kind, name in reversed(self.open) if kind in ("section", "header")), None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("id", tag)))
        if tag == "i" and {"m", "cell"} & set((attributes.get("class") or "").split()):
            self.marks[self.section()] = self.marks.get(self.section(), 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text[self.section()] = self.text.get(self.section(), "") + data + " "

    def links(self) -> list[str]:
        return [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in LOADING]


def report_of(folder: StepFolder) -> StepReport:
    return step_report(load_step(folder.write()))


def page_of(folder: StepFolder) -> str:
    timeline = load_step(folder.write())
    return render_step(timeline, step_report(timeline))


@pytest.mark.parametrize("ranks", [8, 512])
def test_every_chart_of_a_step_has_its_marks(tmp_path: Path, ranks: int) -> None:
    page = Page(page_of(rl_step(tmp_path, ranks=ranks)))
    report = report_of(rl_step(tmp_path, ranks=ranks))
    assert page.marks["account"] == len(report.breakdown.lines)
    assert page.marks["when"] > ranks
    assert page.marks["trajectories"] > 24 * 3
    assert page.marks["tail"] >= len(report.long_tail.spreads if report.long_tail else ()) + 10
    assert page.marks["ranks"] >= 2 * ranks


MANY_STAGES: list[Row] = [(f"trainer stage{index}", index, index + 1) for index in range(40)]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(page_of(rl_step(tmp_path_factory.mktemp("usual"))))


def test_the_head_says_what_took_how_long_and_whether_all_is_there(usual: Page) -> None:
    head = usual.text["header"]
    took = ("1.01 s", "1.01 s with opening and closing the capture", "Most of it: rollout decode")
    for phrase in ("Step 2", "run run1", *took, "complete", "on 1 host"):
        assert phrase in head
    assert "not complete" not in head


def test_the_account_on_the_page_adds_up_to_100(usual: Page, tmp_path: Path) -> None:
    """Many stages are folded and still add up."""
    stages = ("rollout decode", "actor update_actor", "unaccounted", "step", "+ opening, closing")
    for phrase in ("100.0", *stages):
        assert phrase in usual.text["account"]
    folded = Page(page_of(a_step(tmp_path, 40, MANY_STAGES))).text["account"]
    assert "16 smaller stages" in folded
    assert "100.0" in folded


def test_the_links_at_the_top_lead_to_groups_of_sections(usual: Page) -> None:
    sections = [attrs["id"] for kind, attrs in usual.tags if kind == "section"]
    links = [link.removeprefix("#") for link in usual.links() if link.startswith("#")]
    assert links == ["when", "trajectories", "ranks", "complete"]
    assert sorted(links, key=sections.index) == links
    assert sections[0] == "when"


def test_a_stage_has_one_colour_on_every_page(tmp_path: Path) -> None:
    first = a_step(tmp_path / "1", 40, MANY_STAGES)
    second = a_step(tmp_path / "2", 40, [("trainer stage39", 0, 40)])
    swatch = re.compile(r'<i class="swatch (c\d+)"></i>stage39')
    assert swatch.findall(page_of(second)) == [colour_of("stage39")]
    assert f'm {colour_of("stage39")}"' in page_of(first)


def test_a_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    for page in (page_of(rl_step(tmp_path)), run_page(tmp_path)):
        parsed = Page(page)
        assert [link for link in parsed.links() if not link.startswith(("./", "data:,", "#", DOCS))] == []
        assert "url(" not in page
        assert "@import" not in page
        assert "http:" not in page
        assert "https:" not in page.replace(f'href="{DOCS}', "")
        policies = [
            a for t, a in parsed.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
        ]
        assert "default-src 'none'" in (policies[0]["content"] or "")


def test_the_legend_of_words_leads_to_headings_of_the_docs() -> None:
    project = (ROOT / "packages/core/pyproject.toml").read_text()
    assert f'Documentation = "{DOCS.replace("/blob/", "/tree/").rstrip("/")}"' in project
    for word in WORDS:
        file, _, heading = word.place.partition("#")
        lines = (ROOT / "docs" / file).read_text().splitlines()
        headings = [line.lstrip("# ").lower() for line in lines if line.startswith("#")]
        assert heading in {re.sub(r"[^a-z ]", "", line).replace(" ", "-") for line in headings} | {""}, word
    assert all(word.name in legend_of_words() for word in WORDS)


def run_page(tmp_path: Path) -> str:
    folders = [rl_step(tmp_path, step=step, ranks=2) for step in (2, 4, 6)]
    steps = [RunStep(report=report_of(f), href=f"step_{f.step:06d}/report.html") for f in folders]
    return render_run(steps, ["step_000009: <nothing>"])


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, hostile=HOSTILE, ranks=3)
    folder.processes[-1].span("x", 0, 900 * MS, role=HOSTILE, error=HOSTILE)
    harmless = Page(page_of(rl_step(tmp_path / "plain", ranks=3)))
    for page in (
        page_of(folder),
        render_run([RunStep(report=report_of(folder), href=HOSTILE)] * 2, [HOSTILE]),
    ):
        parsed = Page(page)
        assert {name for name, _ in parsed.tags} <= {name for name, _ in harmless.tags} | {"a", "ul", "li"}
        assert sum(name == "script" for name, _ in parsed.tags) == 1
        assert not [a for _, attrs in parsed.tags for a in attrs if a.startswith("on")]
        assert "\x1b" not in page
        assert HOSTILE.partition("\x1b")[0] in "".join(parsed.text.values())


def test_a_link_to_a_step_is_relative_whatever_its_folder_is_called(tmp_path: Path) -> None:
    name = "javascript:alert(1)//a b#?%.html"
    parsed = Page(render_run([RunStep(report=report_of(rl_step(tmp_path)), href=name)]))
    (link,) = [link for link in parsed.links() if not link.startswith(("#", "data:", DOCS))]
    assert link.startswith("./javascript%3A")
    assert unquote(link.removeprefix("./")) == name


def test_why_a_step_is_not_complete_stands_in_its_head(tmp_path: Path) -> None:
    folder = rl_step(tmp_path)
    for reason in ("killed", "out of memory"):
        folder.processes[0].absent.append(Absent(name=f"actor {reason}", state="missing", reason=reason))
    head = page_of(folder).partition("<section")[0]
    assert "actor killed: missing" in head
    assert "actor killed: missing" in printed(report_of(folder), 200).splitlines()[1]


def test_paper_lacks_nothing_that_is_on_the_page(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, ranks=2)
    close(folder, 2000 * MS)
    page = page_of(folder)
    (hidden,) = re.findall(r"([^{};]*)\{ display: none; \}\s*\}\s*</style>", page)
    tags = Page(page).tags
    shown = {name for _, attrs in tags for name in (attrs.get("class") or "").split()}
    assert "hint" in shown  # the advice is on this page
    assert not shown & set(re.findall(r"\.([\w-]+)", hidden))


def test_what_is_missing_stands_on_the_page_with_its_reason(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, hostile="!", ranks=2)
    folder.processes[1].dropped = 3
    folder.processes[2].closed_ns = None
    folder.processes[2].span("update_actor", 800 * MS, None)
    text = Page(page_of(folder)).text
    assert "not complete" in text["header"]
    for reason in ("!: missing: !", "dropped 3 spans", "never closed its capture", "Never ended"):
        assert reason in text["complete"]


def test_an_unaligned_process_is_named_where_it_is_left_out(tmp_path: Path) -> None:
    folder = rl_step(tmp_path, ranks=2)
    folder.process("actor", 2, host="elsewhere").close(1000 * MS)
    page = page_of(folder)
    text = Page(page).text
    assert "unaligned: not drawn" in text["when"]
    assert "unaligned: actor 2" in text["account"]
    assert "1 process unaligned" in text["header"]


def test_a_step_of_which_little_is_left_still_has_a_page(folder: StepFolder) -> None:
    folder.process("actor", 3)
    text = Page(page_of(folder)).text
    assert "not complete" in text["header"]
    assert "trajectories" not in text


def test_signs_on_marks_are_in_the_legend(tmp_path: Path) -> None:
    folder = rl_step(tmp_path)
    signs = {"early", "open"}
    assert signs.isdisjoint(kinds_of_swatches(folder))
    driver = folder.processes[0]
    driver.span("trajectory", -200 * MS, 100 * MS, trajectory="old")
    driver.span("trajectory", 500 * MS, None, role="agent_loop", trajectory="next")
    assert signs <= kinds_of_swatches(folder)
    hovers = [attrs["data-t"] for _, attrs in Page(page_of(folder)).tags if "data-t" in attrs]
    assert "old: 300 ms, began 200 ms before the step" in hovers
    assert "next: agent_loop trajectory, 500 ms from 500 ms; no end recorded" in hovers


def kinds_of_swatches(folder: StepFolder) -> set[str]:
    classes = (set((attrs.get("class") or "").split()) for _, attrs in Page(page_of(folder)).tags)
    return set[str]().union(*(own for own in classes if "swatch" in own))


def test_a_runs_page_puts_its_steps_side_by_side(tmp_path: Path) -> None:
    page = Page(run_page(tmp_path))
    assert page.marks["steps"] > 3 * 4
    assert [link for link in page.links() if "report.html" in link] == [
        f"./step_{step:06d}/report.html" for step in (2, 4, 6)
    ]
    assert "2 → 4" in page.text["changes"]
    assert "step_000009: <nothing>" in page.text["unreadable"]


@pytest.mark.slow
def test_a_page_of_512_ranks_and_2000_trajectories_is_smaller_than_4_mb(tmp_path: Path) -> None:
    page = page_of(rl_step(tmp_path, ranks=512, trajectories=2000))
    assert len(page) < 4_000_000
    assert sum(Page(page).marks.values()) < 25_000


def test_ticks_are_round_and_few() -> None:
    assert ticks(1000 * MS) == [at * 100 * MS for at in range(11)]
    assert ticks(0) == [0]
    assert all(2 <= len(ticks(window)) <= 11 for window in (1, 7, 99, 12345, 10**12, 7 * 10**9))


def gpu_step(tmp_path: Path, ranks: int) -> StepFolder:
    """`rl_step`, with the traces of GPUs on the actors and of an engine on the replica."""
    folder = rl_step(tmp_path, ranks=ranks)
    for process in folder.processes:
        if process.info.role == "actor":
            reduce = kernel("ncclDevKernel_AllReduce", 650_000, 20_000, stream=9)
            events = [kernel("gemm", 610_000, 50_000), reduce, op("aten::mm", 610_000, 300)]
            add_trace(folder, process, [*events, memory(650_000, 6, 7)])
        elif process.info.role == "rollout":
            name = "execute_context_2(64)_generation_6(6)"
            steps = [event(name, "user_annotation", 10_000 * at, 9000) for at in range(1, 50)]
            add_trace(folder, process, steps)
    return folder


@pytest.mark.parametrize("ranks", [8, 512])
def test_sections_of_traces_are_drawn_and_no_name_is_taken_for_markup(tmp_path: Path, ranks: int) -> None:
    folder = gpu_step(tmp_path, ranks)
    add_trace(folder, folder.processes[0], [kernel(HOSTILE, 0, 10)])
    path = folder.write()
    timeline = load_step(path)
    page = Page(render_step(timeline, step_report(timeline, load_traces(path, timeline))))
    assert page.marks["engines"] > 100
    assert page.marks["idle"] >= 3 * min(ranks, 100)
    assert page.marks["kernels"] >= 4
    assert page.marks["devices"] >= 3 * min(ranks, 100)
    for section, phrase in (
        ("kernels", "ncclDevKernel_AllReduce"),
        ("devices", "GPU 0"),
        ("devices", "Most memory"),
        ("engines", "49"),
        ("idle", "slowest rank"),
    ):
        assert phrase in page.text[section]
    assert "img" not in {kind for kind, _ in page.tags}


def test_what_to_do_stands_before_everything_else(tmp_path: Path) -> None:
    folder = rl_step(tmp_path)
    folder.processes[0].dropped = 5
    page = page_of(folder)
    assert "dropped" in Page(page).text["todo"]
    assert page.index('id="todo"') < page.index('id="account"')
