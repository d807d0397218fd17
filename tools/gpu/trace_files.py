"""Files of a step, read without stepscope: sidecars and the events of torch traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """One kernel, copy or fill on a device, or with `--pretend` one operator on the CPU."""

    name: str
    start_ns: int
    """Unix ns."""
    end_ns: int


def artifacts(step: Path, kind: str) -> dict[str, Path]:
    """Return {stage: file} for the files of a kind in a step. The stage is "" for a whole step's file."""
    files = {}
    for sidecar in sorted(step.rglob("*.meta.json")):
        artifact: dict[str, Any] = json.loads(sidecar.read_text())["artifact"]
        if artifact["kind"] == kind:
            files[artifact.get("stage") or ""] = step / artifact["path"]
    return files


def work_in(file: Path, categories: Iterable[str]) -> list[Work]:
    """Return the events of these categories in a trace, sorted by start."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        trace = json.load(stream)
    base_ns, wanted = int(trace.get("baseTimeNanoseconds", 0)), set(categories)
    events = [
        event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in wanted
    ]
    return sorted((_work(event, base_ns) for event in events), key=lambda work: work.start_ns)


def _work(event: dict[str, Any], base_ns: int) -> Work:
    start_ns = base_ns + round(float(event["ts"]) * 1000)
    return Work(event["name"], start_ns, start_ns + round(float(event["dur"]) * 1000))


def counts(works: Iterable[Work]) -> Counter[str]:
    """Return how often each kernel or operator ran, by name, without stepscope's markers."""
    return Counter(work.name for work in works if not work.name.startswith("actor."))


def shown(works: Iterable[Work]) -> str:
    """Return the number of kernels and the number of their names, as a text."""
    counted = counts(works)
    return f"{counted.total()} of {len(counted)} names"


def busy_ns(works: Iterable[Work]) -> int:
    """Return the time in which at least one of `works` ran."""
    total_ns = until_ns = 0
    for work in sorted(works, key=lambda work: work.start_ns):
        total_ns += max(0, work.end_ns - max(work.start_ns, until_ns))
        until_ns = max(until_ns, work.end_ns)
    return total_ns
