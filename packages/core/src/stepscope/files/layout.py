"""Paths in the output folder. Only this module composes them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from stepscope.files.sidecar import ProcessInfo
from stepscope.files.storage import files_below

SIDECAR_SUFFIX = ".meta.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEP = re.compile(r"step_(\d{6,})")


def safe(name: str) -> str:
    """Return `name` as one path component of at most 100 characters that is not empty, `.` or `..`.

    Characters other than ASCII letters, digits, `.`, `_` and `-` are replaced by `-`.
    """
    cleaned = _UNSAFE.sub("-", name).strip(".")[:100]
    return cleaned or "unnamed"


BEGAN, CAPTURED, FAILED = "began", "captured", "failed"
"""First words of the lines in `RunLayout.reached`: a step began, was captured, or could not be captured."""


class RunLayout:
    """The folder of a run: `save_path`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.control = self.root / "control.json"
        self.removed = self.root / "removed.txt"
        """The file of captured steps that `budget.keep_steps` removed, one on each line."""
        self.oom = self.root / "oom"
        """The folder of snapshots and records of CUDA's out-of-memory errors."""
        self.otel = self.root / "otel"
        """The folder of OTLP JSON files of other tracers. Each step uses the spans that belong to it."""
        self.listeners = self.root / "control"
        """The folder with a file for each process that polls `control`."""
        self.orders = self.root / "recorder"
        """The folder of the flight recorder's orders to write steps."""
        self.report = self.root / "report.html"
        """The report of the whole run. Each step has its own report too."""
        self.tables = self.root / "tables"
        """The folder of the report's tables for all steps, as Parquet files."""

    def run(self, run_id: str) -> Path:
        """Return the path for a new run record: `run.json`, or `run_<id>.json` if the folder already has
        another run.
        """
        first = self.root / "run.json"
        return first if not first.exists() else self.root / f"run_{safe(run_id)}.json"

    def runs(self) -> list[Path]:
        return sorted(self.root.glob("run*.json"))

    def oom_record(self, process: ProcessInfo, run_id: str, number: int) -> Path:
        return self.oom / f"{_process_name(process)}_{safe(run_id)}_{number}.json"

    def oom_snapshot(self, process: ProcessInfo, run_id: str, number: int) -> Path:
        return self.oom / f"{_process_name(process)}_{safe(run_id)}_{number}.pickle"

    def tensorboard(self, run_id: str) -> Path:
        """Return the folder of a run's figures for TensorBoard."""
        return self.root / "tensorboard" / safe(run_id)

    def listener(self, host: str, pid: int) -> Path:
        return self.listeners / f"{safe(host)}_pid{pid}.json"

    def listener_files(self, host: str | None = None) -> list[Path]:
        """Return the files of the processes of one host, or of all hosts, that poll or have polled
        `control`.
        """
        return sorted(self.listeners.glob(f"{'*' if host is None else safe(host)}_pid*.json"))

    def claimed(self, request_id: str) -> Path:
        """Return the file with the number of the step that a request for `next` captures."""
        return self.listeners / f"{safe(request_id)}.step"

    def uncaptured(self, process: ProcessInfo, run_id: str) -> Path:
        """Return the file with durations of the steps that this process did not capture."""
        return self.root / "uncaptured" / f"{_process_name(process)}_{safe(run_id)}.jsonl"

    def uncaptured_files(self) -> list[Path]:
        return sorted((self.root / "uncaptured").glob("[!.]*.jsonl"))

    def order(self, run_id: str, order_id: str) -> Path:
        return self.orders / f"{safe(run_id)}_{safe(order_id)}.json"

    def states(self, order_id: str) -> Path:
        """Return the folder for the process states that one order requested."""
        return self.orders / f"why_{safe(order_id)}"

    def state_of(self, process: ProcessInfo, order_id: str) -> Path:
        return self.states(order_id) / f"{_process_name(process)}.json"

    def step_lines(self, run_id: str) -> Path:
        """Return the file with a line for each step of a run."""
        return self.root / f"steps_{safe(run_id)}.jsonl"

    def reached(self, run_id: str) -> Path:
        """Return the file with a line for each event of a run that is instrumented without an edit: a step
        began, was captured, or could not be captured.
        """
        return self.root / f".reached_{safe(run_id)}"

    def outcome(self, run_id: str) -> dict[str, str]:
        """Return {`BEGAN`, `CAPTURED` or `FAILED`: text of the first such line in `reached`}; empty if there
        is no file.
        """
        try:
            lines = self.reached(run_id).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return {}
        pairs = [line.partition(" ") for line in reversed(lines)]
        return {word: text for word, _, text in pairs}

    def step(self, step: int) -> StepLayout:
        return StepLayout(self.root / f"step_{step:06d}")

    def steps(self) -> dict[int, StepLayout]:
        """Return {number: layout} of the captured steps in the folder, in ascending order."""
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
        """The folder of process states at the moment of a hang or a signal."""
        self.otel = self.root / "otel"
        """The folder of OTLP JSON files of other tracers for this step. Files for the whole run are in
        `RunLayout.otel`."""
        self.timeline = self.root / "timeline.json.gz"
        self.report = self.root / "report.html"
        self.tables = self.root / "tables"
        """The folder of the report's tables, as Parquet files."""
        self.digests = self.root / ".digests"
        """The folder in which reports cache the content of traces. Hidden, so that copies may leave it
        out."""

    @property
    def is_step(self) -> bool:
        """True if a process recorded into the folder."""
        return self.processes.is_dir() or self.spans.is_dir()

    def digest_of(self, names: Iterable[str]) -> Path:
        """Return the path of the digest of the traces `names`. The path's length does not depend on the
        names.
        """
        from hashlib import blake2b  # imported here: OpenSSL takes 4 MB, and plain traces do not need OpenSSL

        key = blake2b("\0".join(names).encode(errors="surrogateescape"), digest_size=12).hexdigest()
        return self.digests / f"{key}.digest"

    def part_of(self, process: ProcessInfo, run_id: str, capture: int = 1) -> Path:
        """Return the path of the process' part of the manifest.

        Args:
            run_id: Id of the run, because a folder may have several runs.
            capture: Number of the capture. A step that is retried has several captures in one process.
        """
        return self.processes / f"{_process_name(process)}_{safe(run_id)}{_again(capture)}.json"

    def capture_of(self, path: Path, process: ProcessInfo, run_id: str) -> int:
        """Return the number of the capture from a file name: 1 for `..._run`, 2 for `..._run-2`."""
        first = self.part_of(process, run_id).stem
        number = path.stem.removeprefix(f"{first}-")
        return int(number) if number != path.stem and number.isdecimal() else 1

    def has_part(self, name: str | None) -> bool:
        """Return whether this host sees the manifest part with the file name `name`. True if `name` is
        None.
        """
        return name is None or (self.processes / Path(name).name).exists()

    def has_part_of(self, process: str, run_id: str) -> bool:
        """Return whether this host sees a manifest part of the process for this step.

        Args:
            process: `ProcessInfo.key`, or the end of the key: `host_pid123`.
        """
        end = f"_pid{process.rpartition('_pid')[2]}_{safe(run_id)}"
        host = process.rpartition("_pid")[0].rpartition("_")[2]
        try:
            return any(end in name and safe(host) in name for name in os.listdir(self.processes))
        except OSError:
            return False

    def logged(self, run_id: str, capture: int = 1) -> Path:
        """Return the path of an empty file. The rank that creates the file logs the capture's summary."""
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
        """Return the file with the step's figures in a run."""
        return self.root / f"scalars_{safe(run_id)}.json"

    def metrics(self, run_id: str) -> Path:
        """Return the file with the numbers that the trainer logged for the step."""
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
        """Return the path of a trace:

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
        """Return the hidden folder for profilers that write files while they record. The folder is empty
        after the export.
        """
        return self.root / ".recordings" / _process_name(process)

    def engine_dir(self, replica: int) -> Path:
        """Return the folder for files of an inference replica. The engine chooses their names."""
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


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return the path of `<stem><suffix>` in `folder`, with a number after the stem if that file exists."""
    paths = (folder / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists() and not sidecar_of(path).exists())
