"""Device times of `stepscope report` on traces of real GPUs, compared with an independent computation.

The arguments are folders of Kineto traces, for example `tests/traces` in a clone of TraceLens or `tests/data`
in a clone of HolisticTraceAnalysis (HTA). Nothing is timed. For each trace, these must agree:

* device times and times of kernels, with a computation that reads exact decimals and unites integer intervals
* the time of gaps before kernels that were launched late, with this computation, and with HTA's `host_wait`
  if all kernels are on one stream
* the share of communication that computation hides, with HTA, in whole us as HTA rounds
* the rules of advice, with the list below
* the first kernel of each pass that an engine has annotated, with the kernel whose correlation is that of the
  pass' first launch, CUDA graphs included

HTA is used only for files that it can read.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import report_traces
from _measure import table, verdict

from stepscope.engines.passes import PassLog
from stepscope.files.passes import PassKind
from stepscope_report.timeline.activity.content import Iteration
from stepscope_report.timeline.activity.device_idle import ON_HOST
from stepscope_report.timeline.activity.event_names import iteration_of
from stepscope_report.timeline.merge.mapping import FlowIds
from stepscope_report.timeline.merge.step_events import EngineLaunches
from stepscope_report.timeline.model import EnginePasses

Pair = tuple[int, int]
WORKS = ("busy", "compute", "communication", "exposed")
COMMUNICATION = ("nccl", "rccl", "all_reduce", "allreduce")
"""Words in the lower-case names of kernels that communicate."""


ADVICE: dict[str, set[str]] = {
    "tests/data/df_index_resolver/df_index_resolver.json.gz": {
        "slow-launches", "exposed-communication", "single-precision", "unfused-optimizer",
    },
    "tests/data/nccl_parser_config/nccl_data.json.gz": {"slow-launches"},
    "tests/data/negative_queue_length_values_check/rank0.json.gz": {
        "exposed-communication", "single-precision",
    },
    "h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": set(),
    "h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz": set(),
    "h100/gaunernst_bert-small-uncased__1016001.json.gz": {"no-operator", "slow-launches", "synchronisation"},
    "h100/google_owlv2-large-patch14-ensemble__1016001.json.gz": {"data-loader", "unpinned-copies"},
    "mi300/resnet_act_checkpoint.json.gz": {"exposed-communication"},
}  # fmt: skip
"""{trace of a known program: all rules of advice that must speak about it}."""


class Numbers(NamedTuple):
    devices: dict[str, dict[str, int]]
    """{number of a device: {kind in `WORKS`: ns}}."""
    kernels: dict[str, tuple[int, int]]
    """{name: (calls, summed ns)}."""
    rounding_ns: int = 0
    """Allowed error: if the trace has us since 1970 as doubles, times have steps of 250 ns."""
    host_wait_ns: int | None = None
    """Time of gaps whose next kernel was launched after the gap began, or None for several devices."""
    gaps: int = 0
    streams: int = 0
    advice: frozenset[str] = frozenset()
    hidden: float | None = None
    """Percentage of communication that computation hides, from times in whole us as HTA rounds them."""


def communicates(kernel: str) -> bool:
    return any(part in kernel.lower() for part in COMMUNICATION)


def united(pairs: list[Pair]) -> list[Pair]:
    union: list[Pair] = []
    for start, end in sorted(pairs):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def length(pairs: list[Pair]) -> int:
    return sum(end - start for start, end in united(pairs))


def independent(path: Path) -> Numbers | None:
    """Compute the numbers of a trace. Return None if the file is no trace, or has no device event."""
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read().decode("utf-8", "replace")
    trace = json.loads(text, parse_float=Decimal, parse_int=Decimal, strict=False)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        return None
    times: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    kernels: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    step_us, rounded = 0.0, dict[str, list[Pair]](communication=[], compute=[], copies=[])
    for event in trace["traceEvents"]:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        step_us = max(step_us, math.ulp(float(event["ts"])))
        name, pair = event["name"], (_ns(event["ts"]), _ns(Decimal(event["ts"]) + Decimal(event["dur"])))
        work = "copies"
        if category == "kernel":
            work = "communication" if communicates(name) else "compute"
            calls, total = kernels[name]
            kernels[name] = calls + 1, total + _ns(event["dur"])
        times[str(event["pid"])][work].append(pair)
        rounded[work].append((-(-pair[0] // 1000), pair[1] // 1000))
    devices = {
        device: {
            "busy": length([pair for pairs in works.values() for pair in pairs]),
            "compute": length(works["compute"]),
            "communication": length(works["communication"]),
            "exposed": length(works["communication"] + works["compute"]) - length(works["compute"]),
        }
        for device, works in times.items()
    }
    calls_of_all = sum(calls for calls, _ in kernels.values())
    rounding_ns = round(step_us * 1000) * calls_of_all if step_us > 0.1 else 0
    if not devices:
        return None
    host_wait_ns, gaps, streams = host_waits(trace["traceEvents"]) if len(devices) == 1 else (None, 0, 0)
    return Numbers(devices, dict(kernels), rounding_ns, host_wait_ns, gaps, streams, hidden=_hidden(rounded))


def host_waits(events: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return (ns of gaps whose next kernel was launched late, number of gaps, number of streams)."""
    launches: dict[int, int] = {}
    ran: list[tuple[int, int, int, str]] = []
    for event in events:
        category, number = str(event.get("cat", "")).lower(), event.get("args", {}).get("correlation", -1)
        if event.get("ph") != "X" or number is None:
            continue
        if category in ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime") and number >= 0:
            launches[int(number)] = min(_ns(event["ts"]), launches.get(int(number), 1 << 62))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = _ns(event["ts"])
            ran.append(
                (start, _ns(Decimal(event["ts"]) + Decimal(event["dur"])), int(number), str(event["tid"]))
            )
    waited = gaps = 0
    until = None
    for start, end, number, _ in sorted(ran, key=lambda one: one[0]):
        if until is not None and start > until:
            gaps += 1
            if launches.get(number, until) > until:
                waited += start - until
        until = end if until is None else max(until, end)
    return waited, gaps, len({stream for *_, stream in ran})


def hta_host_wait(path: Path) -> float | None:
    """Return HTA's `host_wait` of the only stream in us, or None if HTA cannot read the file."""
    try:
        analysis = importlib.import_module("hta.trace_analysis").TraceAnalysis(
            trace_files={0: str(path)}, trace_dir="", include_last_profiler_step=True
        )
        times, _ = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
        return float(times[times["idle_category"] == "host_wait"]["idle_time"].sum())
    except Exception as error:
        print(f"HTA does not read {path.name}: {type(error).__name__}")
        return None


def _hidden(works: dict[str, list[Pair]]) -> float | None:
    communication, compute = works["communication"], works["compute"]
    if not communication:
        return None
    exposed = length(communication + compute) - length(compute)
    return 100 - 100 * exposed / length(communication)


def _ns(us: Any) -> int:
    return int((Decimal(us) * 1000).to_integral_value())


def reported(path: Path) -> Numbers:
    """Return the numbers that `stepscope report --json` gives for a trace."""
    command = [sys.executable, "-m", "stepscope", "report", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.strip():
        raise OSError(done.stderr.strip())
    report = json.loads(done.stdout)
    traces = report["traces"]
    devices = {
        row["device"].removeprefix("GPU "): {work: row[f"{work}_ns"] for work in WORKS}
        for row in traces["devices"]
    }
    kernels = {
        row["name"]: (row["count"], row["total_ns"])
        for row in traces["operators"]
        if row["kind"] in ("compute", "communication")
    }
    waited = sum(row["total_ns"] for row in report["gaps"] if row["kind"] in ON_HOST)
    rules = frozenset(advice["rule"] for advice in report["advice"])
    return Numbers(devices, kernels, host_wait_ns=waited, advice=rules)


def differences(path: Path, expected: Numbers, ours: Numbers) -> Iterator[str]:
    if set(expected.devices) != set(ours.devices):
        yield f"{path.name}: devices {sorted(ours.devices)}, expected {sorted(expected.devices)}"
        return
    for device, works in expected.devices.items():
        for work, ns in works.items():
            if abs(ns - ours.devices[device][work]) >= max(1000, expected.rounding_ns):
                yield f"{path.name}: device {device}: {work}: {ours.devices[device][work]} ns, expected {ns}"
    rules = next((rules for name, rules in ADVICE.items() if path.as_posix().endswith(name)), None)
    if rules is not None and rules != ours.advice:
        yield f"{path.name}: advice {sorted(ours.advice)}, expected {sorted(rules)}"
    wait_ns, ours_ns = expected.host_wait_ns, ours.host_wait_ns or 0
    if wait_ns is not None and abs(wait_ns - ours_ns) >= max(1000, expected.rounding_ns):
        yield f"{path.name}: host wait: {ours_ns} ns, expected {wait_ns}"
    for name, (calls, total) in ours.kernels.items():
        if name not in expected.kernels:
            yield f"{path.name}: {name[:60]} is no kernel"
        elif expected.kernels[name][0] != calls or abs(expected.kernels[name][1] - total) >= 1000:
            yield f"{path.name}: {name[:60]}: {calls} calls, {total} ns, expected {expected.kernels[name]}"


def hidden_share(path: Path) -> float | None:
    """Return HTA's percentage of hidden communication, or None if HTA cannot read the file."""
    try:
        analysis = importlib.import_module("hta.trace_analysis").TraceAnalysis(
            trace_files={0: str(path)}, trace_dir="", include_last_profiler_step=True
        )
        return float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
    except Exception as error:
        print(f"HTA does not read {path.name}: {type(error).__name__}")
        return None


def first_kernels(path: Path) -> tuple[int, list[str]]:
    """Return (number of an engine's passes in a trace, passes for which stepscope has another kernel)."""
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
    events = json.loads(text.decode("utf-8", "replace"), strict=False)["traceEvents"]
    spans = sorted(
        (event for event in events if event.get("cat") == "user_annotation" and event.get("ph") == "X"),
        key=lambda event: float(event["ts"]),
    )
    passes: list[tuple[Any, Iteration]] = []
    for span in spans:
        named = iteration_of(span["name"])
        if named is not None and (not passes or span["ts"] > passes[-1][0]["ts"] + passes[-1][0]["dur"]):
            passes.append((span, named))
    ran: dict[Any, float] = {}
    launches: list[tuple[float, Any, Any]] = []
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            ran[number] = min(event["ts"], ran.get(number, math.inf))
        elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches.append((event["ts"], event["tid"], number))
    launches.sort()
    log, seen, different = PassLog(len(passes)), EngineLaunches(), []
    times = [(int(span["ts"] * 1000), int((span["ts"] + span["dur"]) * 1000)) for span, _ in passes]
    for (begin, end), (_, named) in zip(times, passes, strict=True):
        requests = {f"r{number}": 1 for number in range(named.prefills + named.decodes)}
        kind: PassKind = "mixed" if named.prefills else "decode"
        log.note(begin, end, kind, requests, [1] * len(requests), running=len(requests), waiting=0)
    begins, ends = ([pair[at] for pair in times] for at in (0, 1))
    engine = EnginePasses(file="", replica=0, begins_ns=begins, ends_ns=ends, noted=log.file())
    seen.see(json.dumps(events).encode())
    arrows = seen.arrows(engine, set(range(len(passes))), {"pid": 0, "tid": 0}, 0, FlowIds(0, 1))
    ours = [float(str(event["ts"])) for event in arrows if event["ph"] == "f"]
    for span, _ in passes:
        until = span["ts"] + span["dur"]
        first = next(
            (
                ran[n]
                for ts, tid, n in launches
                if span["ts"] <= ts <= until and tid == span["tid"] and n in ran
            ),
            None,
        )
        if first is not None and not any(abs(ts - first) < 0.01 for ts in ours):
            different.append(f"{path.name}: {span['name'][:40]} leads to none of {first} us")
    return len(ours), different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without HolisticTraceAnalysis")
    parser.add_argument("folders", nargs="*", type=Path, help="folders of Kineto traces of GPUs")
    options = parser.parse_args()
    if not options.folders:
        print("no folder of traces is given: nothing is compared")
        return
    report_traces.quiet()
    try:
        trace = importlib.import_module("hta.common.trace").Trace
        # HTA would leave out kernels that were launched outside of a ProfilerStep.
        trace._filter_irrelevant_gpu_kernels = lambda self, include_last_profiler_step=False: None
        with_hta = not options.quick
    except ImportError:
        with_hta = False
        print("not installed: HolisticTraceAnalysis")
    rows, different = list[list[str]](), list[str]()
    times = kernels = shares = waits = passes = 0
    for path in sorted(path for folder in options.folders for path in folder.rglob("*.json*")):
        expected = independent(path)
        if expected is None:
            continue
        ours = reported(path)
        different += differences(path, expected, ours)
        pointed, elsewhere = first_kernels(path)
        passes, different = passes + pointed, different + elsewhere
        times += sum(len(works) for works in expected.devices.values())
        kernels += len(ours.kernels)
        if with_hta and expected.streams == 1 and (wait_us := hta_host_wait(path)) is not None:
            waits += 1
            # HTA rounds starts up and ends down, to whole us.
            if not 0 <= wait_us * 1000 - (expected.host_wait_ns or 0) <= 2000 * expected.gaps:
                different.append(f"{path.name}: {expected.host_wait_ns} ns, host_wait of HTA {wait_us} us")
        theirs = None
        if with_hta and expected.hidden is not None and len(expected.devices) == 1:
            theirs = hidden_share(path)
        if theirs is not None and expected.hidden is not None:
            shares += 1
            if abs(theirs - expected.hidden) > 0.01:
                different.append(f"{path.name}: {expected.hidden:.2f} % is hidden, and {theirs:.2f} % by HTA")
        for works in expected.devices.values():
            hidden = "-" if theirs is None else f"{theirs:.2f}"
            rows.append([path.name[:40], *(f"{works[work] / 1e6:.3f}" for work in WORKS), hidden])
    table(["ms on the device", *WORKS, "hidden % (HTA)"], rows)
    print(*(f"DIFFERENT  {line}" for line in different), sep="\n", end="\n" * bool(different))
    print(f"compared: {times} times of {len(rows)} devices, {kernels} kernels")
    print(f"and the hidden communication of {shares} traces that HTA reads, and its host_wait of {waits}")
    print(f"and the first work of {passes} passes of engines")
    verdict("numbers that differ", len(different), 0, "")


if __name__ == "__main__":
    main()
