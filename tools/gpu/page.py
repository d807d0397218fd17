"""`gpu.json` and `gpu.md`: the results of all parts, for programs and for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.gpu.results import Result

PRETENDED = "pretended: nothing ran on a GPU"
LARGEST_BYTES = 15 << 20
"""Limit of the size of all files together, so that the folder stays under 16 MB."""


def write_results(folder: Path, results: Sequence[Result], *, pretend: bool, files: Sequence[str]) -> None:
    """Write both files. The command does so after each part, so that an interrupted run leaves results."""
    whole = {
        "format": 1,
        "pretend": pretend,
        "notice": PRETENDED if pretend else None,
        "failed": [result.name for result in results if result.failed],
        "parts": [{**asdict(result), "agreed": result.sources} for result in results],
        "files": list(files),
    }
    (folder / "gpu.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "gpu.md").write_text("\n".join(_page(results, pretend, files)) + "\n")


def _page(results: Sequence[Result], pretend: bool, files: Sequence[str]) -> Iterable[str]:
    mark = f" ({PRETENDED})" if pretend else ""
    yield f"# GPU run{mark}"
    yield ""
    rows = [
        [result.name, result.state + mark, f"{result.seconds:.0f}", "; ".join(result.sources)]
        for result in results
    ]
    yield from _table(["part", "state", "s", "agreed"], rows)
    if files:
        yield f"Beside this page{mark}: {', '.join(files)}"
    for result in results:
        yield from _part(result, mark)


def _part(result: Result, mark: str) -> Iterable[str]:
    yield ""
    yield f"## {result.name}: {result.title}{mark}"
    yield ""
    checks = [
        ["yes" if check.agrees else "**NO**", check.what, check.ours, check.theirs, check.source]
        for check in result.checks
    ]
    if checks:
        yield from _table(["agrees", "check", "stepscope", "independent", "source"], checks)
    if result.figures:
        yield from _table(["figure", "value"], [list(pair) for pair in result.figures.items()])
    yield from (f"* {line}{mark}" for line in (*map(str, result.goals), *result.notes))
    if result.error:
        yield from ("", "```text", result.error.strip(), "```")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |"
    yield ""


def keep_small(folder: Path, first_to_go: Sequence[str]) -> list[str]:
    """Delete files in the order of `first_to_go` until the folder is small enough. Return their names."""
    gone = []
    for name in first_to_go:
        if sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST_BYTES:
            break
        if (folder / name).exists():
            (folder / name).unlink()
            gone.append(name)
    return gone
