"""The pages in a real browser: the script runs, nothing is logged, every chart has marks of some size."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from packages.report.tests.pictures import HOSTILE, rl_step
from stepscope_report.cli import run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {', '.join(NAMES)}"),
]

PROBE = """<script>
addEventListener("load", () => {
  const size = (mark) => mark.getBoundingClientRect();
  const wide = (mark) => size(mark).width >= 1 && size(mark).height >= 1;
  for (const section of document.querySelectorAll("section")) {
    section.dataset.drawn = [...section.querySelectorAll(".m, .cell")].filter(wide).length;
  }
  const gantt = document.getElementById("gantt"), box = gantt.querySelector(".track").getBoundingClientRect();
  const send = (kind, target, at) => target.dispatchEvent(
    new MouseEvent(kind, { bubbles: true, clientX: box.left + at * box.width, clientY: box.top + 5 }));
  send("mousemove", gantt.querySelector(".m"), 0.1);
  document.body.dataset.tip = document.getElementById("tip").textContent;
  const bar = gantt.querySelector('i.m[data-t^="trainer:"]');
  const command = () => gantt.previousElementSibling.lastChild.textContent;
  send("mousedown", bar, 0.1);
  send("mouseup", bar, 0.1);
  document.body.dataset.clicked = command();
  send("mousedown", gantt, 0.25);
  send("mousemove", gantt, 0.5);
  send("mouseup", gantt, 0.75);
  document.body.dataset.dragged = command();
  document.body.dataset.zoom = document.documentElement.style.getPropertyValue("--w");
  document.body.dataset.ticks = [...gantt.querySelectorAll(".axis b")].map((tick) => tick.textContent).join();
});
</script>"""
"""Looks and drags as a person would. The page's policy forbids it, so that it is added to a page without."""


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[str, str]:
    """(the document as it became, what the page logged)."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--window-size=1280,2000", "--virtual-time-budget=4000",
            f"--user-data-dir={tmp_path / 'browser'}", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(logged)


def pages(tmp_path: Path, **shape: int | str) -> tuple[Path, Path]:
    """Return the page of a step, and that of its run."""
    for step in (2, 4):
        rl_step(tmp_path / "run", step=step, **shape).write()  # type: ignore[arg-type]  # a shape's words
    run(["report", str(tmp_path / "run")])
    return tmp_path / "run" / "step_000002" / "report.html", tmp_path / "run" / "report.html"


@pytest.mark.parametrize("ranks", [8, 512])
def test_a_steps_page_is_drawn_without_a_word_on_the_console(tmp_path: Path, ranks: int) -> None:
    page, _ = pages(tmp_path, ranks=ranks)
    source = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", PROBE + "</body>")
    probed = page.with_name("probed.html")
    probed.write_text(source)
    seen, logged = browse(probed, tmp_path, "--dump-dom")
    assert logged == ""
    drawn = dict(re.findall(r'<section id="(\w+)"[^>]* data-drawn="(\d+)"', seen))
    for chart in ("account", "when", "trajectories", "tail", "engines", "idle", "ranks"):
        assert int(drawn[chart]) > 5, chart
    assert ' rollout, 600 ms from 0"' in seen
    zoom = re.search(r'data-zoom="([\d.]+)%"', seen)
    assert zoom
    assert 195 < float(zoom[1]) < 205
    merge = f" As a timeline: stepscope merge '{page.parent}' --from 0 --to"
    assert f'data-clicked="{merge} 600 --output part.json.gz"' in seen
    dragged = re.search(r'data-dragged=".* --from (\S+) --to (\S+) --output part.json.gz"', seen)
    assert dragged
    assert 249 < float(dragged[1]) < 251
    assert 749 < float(dragged[2]) < 751
    assert 'data-ticks="300 ms,' in seen


@pytest.mark.parametrize("which", [0, 1], ids=["step", "run"])
def test_under_its_own_policy_only_the_pages_script_runs(tmp_path: Path, which: int) -> None:
    page = pages(tmp_path, hostile=HOSTILE, ranks=2)[which]
    seen, logged = browse(page, tmp_path, "--dump-dom")
    assert logged == ""
    assert re.search(r'<html[^>]* data-ready="\d+"', seen)
    assert "<title>1</title>" not in seen


def test_a_picture_of_the_page_can_be_taken(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(pages(tmp_path)[0], tmp_path, f"--screenshot={picture}")
    # A white page of this size is 10 kB.
    assert picture.stat().st_size > 40_000
