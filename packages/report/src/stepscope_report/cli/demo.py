"""`stepscope demo`: a real, small RL post-training run on this machine, profiled, with its report."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import find_steps
from stepscope_report.cli.report import Pages, read_reports, say_pages, show_reports
from stepscope_report.timeline import merge_step


def demo(
    path: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("outputs/demo"),
    steps: Annotated[
        int, typer.Option(help="Steps to train; the second and fourth are captured.", min=2)
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the problems and the sampling.")] = 0,
    engine: Annotated[
        str,
        typer.Option(
            help="Engine that generates: torch (the demo's own), vllm, sglang, or NAME=PYTHON,NAME=PYTHON."
        ),
    ] = "torch",
) -> None:
    """Train a small model with RL on this machine's CPU, capture two steps, and show where their time went.

    Needs torch and Ray. Takes about a minute.
    """
    missing = [name for name in ("torch", "ray") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"the demo trains a real model, and {' and '.join(missing)} cannot be imported here. "
            "Fix: pip install torch 'stepscope[ray]'"
        )
    if switch.DISABLED:
        raise CommandError(f"{switch.VARIABLE} is set, so nothing would be recorded. Fix: unset it")
    from stepscope_report.demo.trainer import run_demo

    result = run_demo(path, steps=steps, seed=seed, engine=engine, on_progress=screen.say)
    captured = [layout for step in result.captured for layout in find_steps(result.save_path, step)]
    # Merged first, because a page links only to files that exist.
    merged = [merge_step(layout.root) for layout in captured]
    pages = Pages()
    reports = read_reports(captured, pages=pages, traces=True)
    pages.add_run(RunLayout(result.save_path), reports.steps, reports.unreadable)
    show_reports(reports)
    say_pages(pages)
    for layout in captured:
        screen.say(f"Timeline: {layout.timeline}, for https://ui.perfetto.dev")
    rewards = ", ".join(f"{reward:.2f}" for reward in result.rewards)
    screen.say(f"\n{len(result.rewards)} steps in {result.seconds:.0f} s; mean rewards {rewards}")
    screen.say(f"Everything is in {result.save_path}; see it again with: stepscope report {result.save_path}")
    complete = all(report.health.complete for report in reports.steps)
    complete = complete and not any(timeline.problems or timeline.incomplete for timeline in merged)
    raise typer.Exit(Exit.OK if complete else Exit.INCOMPLETE)
