"""`stepscope mcp`: a server of the Model Context Protocol on stdin and stdout, for coding agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import stepscope
from stepscope.errors import CaptureError, RecordError, StepscopeError
from stepscope.files import switch
from stepscope.files.layout import RunLayout
from stepscope_report import OpenRun, OpenStep, OpenTraces
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.diff import compare_sides, read_side
from stepscope_report.cli.ls import rows_of
from stepscope_report.cli.screen import exact
from stepscope_report.cli.what_if import longest_step
from stepscope_report.formatting import duration
from stepscope_report.gate import parse_limits
from stepscope_report.near import Neighbours
from stepscope_report.opened import open as open_path
from stepscope_report.sections.long_tail import tail_sentences
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import predict

ROWS = 200
"""Largest number of rows in an answer."""
_STEPS = 50
"""Number of the last steps of a run that are listed."""
_DEPTH = 4
"""Depth below the root to which folders are searched for runs."""


class Tools:
    """The tools for the runs below `root`. Each public method is one tool, and its docstring is the tool's
    description.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def readers(self) -> tuple[Callable[..., str], ...]:
        """Return the tools that only read."""
        return (
            self.list_runs,
            self.brief,
            self.explain_stage,
            self.slowest_trajectories,
            self.query_spans,
            self.diff,
            self.what_if,
        )

    def list_runs(self) -> str:
        """List the runs with the state, duration and missing parts of each captured step (JSON)."""
        runs = {}
        for folder in islice(self._runs(), ROWS):
            steps = RunLayout(folder).steps()
            near = Neighbours()
            rows = [row for number, layout in steps.items() for row in rows_of(number, layout, near)]
            runs[str(folder.relative_to(self._root))] = [
                {
                    "step": row.step,
                    "run_id": row.run_id,
                    "state": row.state,
                    "took": duration(row.wall_ns),
                    "problems": row.problems[:3],
                }
                for row in rows[-_STEPS:]
            ]
        return _json(runs)

    def brief(self, path: str, step: int | None = None) -> str:
        """Summarise a step in at most 40 lines (Markdown). For a run without `step`, summarise the
        step that failed, else the longest.

        `path` is the folder of a run or a step, as `list_runs` names it, or of traces that other tools wrote.
        Begin with this tool.
        """
        if step is None:
            return open_path(self._path(path)).brief(markdown=True)
        return self._open(path, step, traces=True).brief(markdown=True)

    def explain_stage(self, path: str, stage: str, step: int | None = None, role: str | None = None) -> str:
        """Explain one stage of a step (JSON): its share, its calls, the part of each process, and what ran at
        the same time.

        Without `step`, the step of `brief` is explained. Times are integers in ns.
        """
        report = self._chosen(path, step).report()
        labels = sorted({(row.role, row.stage) for row in report.stages})
        if not any(label[1] == stage and role in (None, label[0]) for label in labels):
            names = ", ".join(" ".join(label) for label in labels[:ROWS])
            asked = repr(stage) if role is None else f"{stage!r} of role {role!r}"
            raise RecordError(f"step {report.step} has no stage {asked}; it has: {names}")

        def fits(row: Any) -> bool:
            return row.stage == stage and role in (None, row.role)

        tail = report.long_tail
        beside = (
            overlap
            for overlap in report.breakdown.overlaps
            if any(name == stage for _, name in overlap.stages)
        )
        return _json(
            {
                "step": report.step,
                "step_ns": report.breakdown.window_ns,
                "share": [line for line in report.breakdown.lines if fits(line)],
                "calls": [row for row in report.stages if fits(row)],
                "at_the_same_time": list(beside)[:10],
                "spread_over_trajectories": []
                if tail is None
                else [row for row in tail.spreads if fits(row)],
                "advice": [item for item in report.advice if stage in f"{item.what} {item.because}"],
            }
        )

    def slowest_trajectories(self, path: str, step: int | None = None, most: int = 5) -> str:
        """List the slowest trajectories of a step, and what each waited for (JSON, times in ns)."""
        report = self._chosen(path, step).report()
        tail = report.long_tail
        if tail is None:
            raise RecordError(f"step {report.step} has no trajectories: no span belongs to one")
        worst = tail.worst[: _bounded(most)]
        return _json({"step": report.step, "summary": tail_sentences(tail), "slowest": worst})

    def query_spans(
        self,
        path: str,
        step: int | None = None,
        role: str | None = None,
        stage: str | None = None,
        trajectory: str | None = None,
        limit: int = 50,
    ) -> str:
        """List the longest spans of a step that match (JSON, times in ns): at most `limit`, and at most 200.

        Spans without an end (`dur_ns` is null) come first. `matching` is the number of all spans that match.
        `start_ns` counts from the opening of the capture. Without `step`, the step of `brief` is used.
        """
        wanted = {"role": role, "stage": stage, "trajectory": trajectory}
        opened = self._chosen(path, step)
        rows = [
            row
            for row in opened.table("spans")
            if all(value in (None, row[field]) for field, value in wanted.items())
        ]
        rows.sort(key=lambda row: (row["dur_ns"] is None, row["dur_ns"] or 0), reverse=True)
        return _json({"step": opened.report().step, "matching": len(rows), "spans": rows[: _bounded(limit)]})

    def diff(
        self, a: str, b: str, kernels: bool = False, fail_above: str | None = None, stage: str | None = None
    ) -> str:
        """Compare two steps, or the means of two runs (JSON, in ns): the largest changes from a to b.

        `kernels` adds the operators and kernels that changed most. `fail_above`, such as `5%`, adds a verdict
        in s: whether the step grew by more than that, beyond chance. With `stage`, such as `rollout/*`, the
        verdict is on these stages instead.
        """
        limits = [] if fail_above is None else parse_limits([fail_above], [] if stage is None else [stage])
        one, other = (
            read_side(name, self._path(path), gated=bool(limits), kernels=kernels)
            for name, path in (("a", a), ("b", b))
        )
        change, gate = compare_sides(one, other, limits)
        answer: dict[str, Any] = {} if gate is None else {"gate": gate}
        if change is not None:
            answer |= {"a": change.a, "b": change.b, "delta_ns": change.delta_ns}
            answer |= {"changes": change.changes[:20], "kernels": change.kernels}
        return _json(answer)

    def what_if(
        self,
        path: str,
        step: int | None = None,
        replicas: str | None = None,
        balance: str | None = None,
        cut_tail: str | None = None,
        tool_pool: str | None = None,
        max_requests: str | None = None,
        staleness: int | None = None,
        overlap: str | None = None,
    ) -> str:
        """Predict how long a step would take with changes, with an error bar (JSON, in ns).

        `replicas`, `tool_pool`, `max_requests` (at once in a replica): `+2`, `-1`, `x2` or `6`. `balance`:
        `length` or `load`. `cut_tail`: `p95`. `staleness`: 1. `overlap`: `reward`. For a run, its longest
        step is used.
        """
        options = Options(
            replicas=replicas,
            balance=balance,
            cut_tail=cut_tail,
            tool_pool=tool_pool,
            max_requests=max_requests,
            staleness=staleness,
            overlap=overlap,
        )
        return _json(predict(longest_step(self._path(path), step), options))

    def trigger(
        self, run: str, steps: str = "next", ranks: str | None = None, last: int | None = None
    ) -> str:
        """Ask a live run to capture steps: `next`, one number, or START:STOP. This is the only tool that
        writes.

        `last` asks for the last steps of the flight recorder instead. `list_runs` shows captured steps.
        """
        if switch.DISABLED:
            raise CaptureError(f"{switch.VARIABLE} is set, so nothing is asked for. Fix: unset it")
        request = stepscope.request_capture(steps, ranks=ranks, last=last, save_path=self._path(run))
        return f"Asked: request {request}. `stepscope trigger list {self._path(run)}` shows the answers."

    def _runs(self) -> Iterator[Path]:
        """Yield the folders of runs with captured steps. Folders inside a run are not searched."""
        for folder, names, _ in os.walk(self._root):
            path = Path(folder)
            if RunLayout(path).steps():
                yield path
                names.clear()
            elif len(path.relative_to(self._root).parts) >= _DEPTH:
                names.clear()
            names.sort()

    def _path(self, name: str) -> Path:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root):
            raise RecordError(f"{name} is not below {self._root}, which is all that this server reads")
        return path

    def _open(self, path: str, step: int | None, *, traces: bool = False) -> OpenRun | OpenStep:
        folder = self._path(path)
        steps = RunLayout(folder).steps()
        if step is not None and steps:
            if step not in steps:
                raise RecordError(f"{path} holds no step {step}. Captured: {', '.join(map(str, steps))}")
            folder = steps[step].root  # the run that captured the step last, if several did
        opened = open_path(folder, traces=traces)
        if isinstance(opened, OpenTraces):
            raise RecordError(f"{path} holds traces without spans. Fix: ask for its `brief`")
        return opened

    def _chosen(self, path: str, step: int | None) -> OpenStep:
        opened = self._open(path, step)
        return opened.read_first() if isinstance(opened, OpenRun) else opened


def _bounded(number: int) -> int:
    return min(max(number, 1), ROWS)


def _json(value: object) -> str:
    return msgspec.json.encode(exact(value)).decode()


_INSTRUCTIONS = (
    "stepscope shows where captured steps of RL post-training runs went. Call list_runs, then brief; then "
    "explain_stage, slowest_trajectories, query_spans, diff and what_if for details."
)


def mcp(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with the runs; nothing outside is read.")
    ] = Path(),
) -> None:
    """Serve the runs of a folder to a coding agent, as tools of the Model Context Protocol over stdio."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder: give the one that holds the runs")
    server_of, tool_error, annotations_of = _package()
    tools = Tools(folder)
    server = server_of("stepscope", instructions=_INSTRUCTIONS)
    for tool in tools.readers():
        server.tool(annotations=annotations_of(readOnlyHint=True))(_told(tool, tool_error))
    server.tool(annotations=annotations_of(readOnlyHint=False))(_told(tools.trigger, tool_error))
    server.run()


def _package() -> tuple[Any, type[Exception], Any]:
    """Return (class of the server, error whose text clients see, class of a tool's annotations).

    mcp 2 renamed the server of mcp 1.
    """
    try:
        from mcp.types import ToolAnnotations

        try:
            from mcp.server.mcpserver import MCPServer
            from mcp.server.mcpserver.exceptions import ToolError
        except ModuleNotFoundError:
            from mcp.server.fastmcp import FastMCP as MCPServer
            from mcp.server.fastmcp.exceptions import ToolError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"stepscope mcp needs {error.name}, which is not installed. "
            "Fix: pip install 'stepscope[cli,mcp]'",
            Exit.USAGE,
        ) from error
    return MCPServer, ToolError, ToolAnnotations


def _told(tool: Callable[..., str], error_of: type[Exception]) -> Callable[..., str]:
    """Wrap a tool so that its errors have the type `error_of`. mcp 2 hides the text of all other errors from
    clients.
    """

    @wraps(tool)
    def told(*args: Any, **kwargs: Any) -> str:
        try:
            return tool(*args, **kwargs)
        except (StepscopeError, CommandError, OSError) as error:
            raise error_of(str(error)) from error

    return told
