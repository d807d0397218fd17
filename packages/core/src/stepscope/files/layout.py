"""Paths of the output tree. No other module builds paths or file names in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage.reading import files_below

SIDECAR_SUFFIX = ".meta.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEP = re.compile(r"step_(\d{6,})")


def safe(name: str) -> str:
    """Return `name` as one path component, never empty, `.` or `..`.

    Each character that is no letter, digit, `.`, `_` or `-` becomes `-`.
    """
    cleaned = _UNSAFE.sub("-", name).strip(".")[:100]
    return cleaned or "unnamed"


BEGAN, CAPTURED, FAILED = "began", "captured", "failed"
"""First words of the lines in `RunLayout.reached`: a step began, is being captured, or could not be
captured."""


class RunLayout:
    """The folder of a run: `save_path`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.control = self.root / "control.json"
        self.removed = self.root / "removed.txt"
        """List of the captured steps that retention removed, one on each line."""
        self.oom = self.root / "oom"
        """Snapshots and records of CUDA's out-of-memory errors."""
        self.otel = self.root / "otel"
        """OTLP JSON files of other tracers, of which each step takes its own spans."""
        self.listeners = self.root / "control"
        """The folder with a file for each process that polls `control`."""
        self.orders = self.root / "recorder"
        """The folder of the flight recorder's orders to write steps."""
        self.report = self.root / "report.html"
        """The page of the whole run; each step has its own."""
        self.tables = self.root / "tables"
        """The folder of a report's tables of all steps, as Parquet files."""

    def run(self, run_id: str) -> Path:
        """Return `run.json`, or `run_<id>.json` for a further run in the same folder."""
        first = self.root / "run.json"
        return first if not first.exists() else self.root / f"run_{safe(run_id)}.json"

    def runs(self) -> list[Path]:
        return sorted(self.root.glob("run*.json"))

    def oom_record(self, process: ProcessInfo, run_id: str, number: int) -> Path:
        return self.oom / f"{_process_name(process)}_{safe(run_id)}_{number}.json"

    def oom_snapshot(self, process: ProcessInfo, run_id: str, number: int) -> Path:
        return self.oom / f"{_process_name(process)}_{safe(run_id)}_{number}.pickle"

    def tensorboard(self, run_id: str) -> Path:
        """Return the folder of a run's curves, for `tensorboard --logdir`."""
        return self.root / "tensorboard" / safe(run_id)

    def listener(self, host: str, pid: int) -> Path:
        return self.listeners / f"{safe(host)}_pid{pid}.json"

    def claimed(self, request_id: str) -> Path:
        """Return the file that holds the step which a request for `next` captures."""
        return self.listeners / f"{safe(request_id)}.step"

    def uncaptured(self, process: ProcessInfo, run_id: str) -> Path:
        """Return the file with durations of steps that this process did not capture."""
        return self.root / "uncaptured" / f"{_process_name(process)}_{safe(run_id)}.jsonl"

    def uncaptured_files(self) -> list[Path]:
        return sorted((self.root / "uncaptured").glob("[!.]*.jsonl"))

    def order(self, run_id: str, order_id: str) -> Path:
        return self.orders / f"{safe(run_id)}_{safe(order_id)}.json"

    def states(self, order_id: str) -> Path:
        """Return the folder for the states of processes that one order requested."""
        return self.orders / f"why_{safe(order_id)}"

    def state_of(self, process: ProcessInfo, order_id: str) -> Path:
        return self.states(order_id) / f"{_process_name(process)}.json"

    def step_lines(self, run_id: str) -> Path:
        """Return the file with a line for each step of a run."""
        return self.root / f"steps_{safe(run_id)}.jsonl"

    def reached(self, run_id: str) -> Path:
        """Return the file with a line for each event of a run whose loop is not edited: a step began, was
        captured, or failed.
        """
        return self.root / f".reached_{safe(run_id)}"

    def outcome(self, run_id: str) -> dict[str, str]:
        """Return the first line of each kind in `reached`: {`BEGAN` or another kind: text}."""
        try:
            lines = self.reached(run_id).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return {}
        pairs = [line.partition(" ") for line in reversed(lines)]
        return {word: text for word, _, text in pairs}

    def step(self, step: int) -> StepLayout:
        return StepLayout(self.root / f"step_{step:06d}")

    def steps(self) -> dict[int, StepLayout]:
        """Return the captured steps in the folder, by number, ascending."""
        layouts = {}
        for path in self.root.glob("step_*"):
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                layouts[int(match[1])] = StepLayout(path)
        return dict(sorted(layouts.items()))


class StepLayout:
    """The folder of one captured step."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.manifest = self.root / "manifest.json"
        self.processes = self.root / "processes"
        self.spans = self.root / "spans"
        self.counters = self.root / "counters"
        self.traces = self.root / "traces"
        self.states = self.root / "states"
        """The states of processes at the moment of a hang or a signal."""
        self.otel = self.root / "otel"
        """OTLP JSON files of other tracers. Those of the whole run are in `RunLayout.otel`."""
        self.timeline = self.root / "timeline.json.gz"
        self.report = self.root / "report.html"
        self.tables = self.root / "tables"
        """The folder of the report's tables, as Parquet files."""
        self.digests = self.root / ".digests"
        """The folder of contents of traces that a report read. Hidden, so that copies may leave it out."""

    @property
    def is_step(self) -> bool:
        """True if a process recorded into the folder."""
        return self.processes.is_dir() or self.spans.is_dir()

    def digest_of(self, names: Iterable[str]) -> Path:
        """Return the path of one of `digests`. The length of its name does not depend on the traces'
        names.
        """
        from hashlib import blake2b  # here: OpenSSL takes 4 MB, and plain traces need none

        key = blake2b("\0".join(names).encode(errors="surrogateescape"), digest_size=12).hexdigest()
        return self.digests / f"{key}.digest"

    def part_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        """Return the path of the process' part of the manifest.

        Args:
            run_id: Separates two runs in one folder.
            capture: The number of this capture among those of the step in this process (a retried step).
        """
        return self.processes / f"{_process_name(process)}_{safe(run_id)}{_again(capture)}.json"

    def capture_of(self, path: Path, process: ProcessInfo, run_id: str) -> int:
        """Return the number of the capture that a file name ends with: `..._run`, `..._run-2`."""
        first = self.part_of(process, run_id).stem
        number = path.stem.removeprefix(f"{first}-")
        return int(number) if number != path.stem and number.isdecimal() else 1

    def has_part(self, name: str | None) -> bool:
        """Return whether this host sees the manifest part with that file name. True if `name` is None."""
        return name is None or (self.processes / Path(name).name).exists()

    def has_part_of(self, process: str, run_id: str) -> bool:
        """Return whether a process takes part in a capture of the step, as far as this host sees.

        Args:
            process: `ProcessInfo.key`, or the end of it: `host_pid123`.
        """
        end = f"_pid{process.rpartition('_pid')[2]}_{safe(run_id)}"
        host = process.rpartition("_pid")[0].rpartition("_")[2]
        try:
            return any(end in name and safe(host) in name for name in os.listdir(self.processes))
        except OSError:
            return False

    def logged(self, run_id: str, capture: int = 1) -> Path:
        """Return the path of the mark that a rank has logged the summary of this capture of the step."""
        return self.processes / f"logged_{safe(run_id)}{_again(capture)}"

    def spans_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        return self.spans / f"{_process_name(process)}_{safe(run_id)}{_again(capture)}.jsonl"

    def counters_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        return self.counters / f"{_process_name(process)}_{safe(run_id)}{_again(capture)}.jsonl"

    def state_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        return self.states / f"{_process_name(process)}_{safe(run_id)}{_again(capture)}.json"

    def finish_log_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        """Return the path of the log with the output of `finish.command`."""
        return self.root / f"finish_{_process_name(process)}_{safe(run_id)}{_again(capture)}.log"

    def scalars(self, run_id: str) -> Path:
        """Return the file with a run's figures of the step, for curves."""
        return self.root / f"scalars_{safe(run_id)}.json"

    def metrics(self, run_id: str) -> Path:
        """Return the path of the numbers that a run's trainer logged for the step."""
        return self.root / f"metrics_{safe(run_id)}.json"

    def trace_of(
        self,
        process: ProcessInfo,
        run_id: str,
        *,
        role: str,
        stage: str | None,
        index: int,
        kind: str,
        suffix: str,
    ) -> Path:
        """Return the path of a trace.

        `traces/<role>/<stage>_rank<r>-of-<w>_<host>_pid<p>_<run>_<index>_<kind><suffix>`
        """
        rank = "rank-unknown" if process.rank is None else f"rank{process.rank}"
        of = "" if process.world_size is None else f"-of-{process.world_size}"
        name = (
            f"{safe(stage or 'capture')}_{rank}{of}_{safe(process.host)}_pid{process.pid}"
            f"_{safe(run_id)}_{index}_{safe(kind)}{suffix}"
        )
        return self.traces / safe(role) / name

    def recordings_of(self, process: ProcessInfo) -> Path:
        """Return the hidden folder for profilers that write while they record; empty after the export."""
        return self.root / ".recordings" / _process_name(process)

    def engine_dir(self, replica: int) -> Path:
        """Return the folder in which the engine of replica `replica` writes, under names of its own."""
        return self.traces / "rollout" / f"replica{replica}"

    def sidecars(self) -> list[Path]:
        return sorted(path for path in files_below(self.traces) if path.name.endswith(SIDECAR_SUFFIX))


def sidecar_of(artifact: Path) -> Path:
    return artifact.with_name(artifact.name + SIDECAR_SUFFIX)


def _again(capture: int) -> str:
    return "" if capture == 1 else f"-{capture}"


def _process_name(process: ProcessInfo) -> str:
    rank = "rank-unknown" if process.rank is None else f"rank{process.rank}"
    return f"{safe(process.role)}_{rank}_{safe(process.host)}_pid{process.pid}"
