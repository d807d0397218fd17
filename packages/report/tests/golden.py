"""The golden steps in `data/`: small folders of captured steps, and what merge and report make of each.

    python packages/report/tests/golden.py expect            # writes data/NAME.json anew: read the diff
    python packages/report/tests/golden.py trim STEP_FOLDER  # makes the folders anew, from a step of the demo

The folders come from one step that the demo recorded (`stepscope demo`): trimmed to a few trajectories and a
few dozen events of each trace, under another host's name; then each scenario takes away what its name says.
`overlapping` is made by `stepscope.testing.steps`: the demo is not asynchronous.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.files.layout import StepLayout
from stepscope.testing.steps import StepFolder
from stepscope_report.cli.report import read_reports
from stepscope_report.timeline import merge_step

DATA = Path(__file__).with_name("data")
MS = 1_000_000
_TRAJECTORIES = tuple(f"step2-problem{problem}-{number}" for problem in (0, 7) for number in (0, 1, 2))
_EVENTS = 60
_RENAMED = {
    "_vm_": "_node-a_",
    '"host": "vm"': '"host": "node-a"',
    '"host":"vm"': '"host":"node-a"',
    '"host_name": "vm"': '"host_name": "node-a"',
}


def steps() -> dict[str, Path]:
    """By name: `aligned`, or `overlapping/step_000005` where a scenario has several."""
    return {
        path.parent.relative_to(DATA).as_posix().removesuffix("/step_000002"): path.parent
        for path in sorted(DATA.rglob("processes"))
    }


def expected_path(name: str) -> Path:
    return DATA / f"{name.replace('/', '-')}.json"


def seen(step: Path) -> dict[str, Any]:
    """Return the metadata of a merge, and all of `stepscope report --json` but its prose, and the segments of
    the critical path, which its stages sum up.
    """
    with tempfile.TemporaryDirectory() as folder:
        merged = merge_step(step, to=Path(folder) / "timeline.json.gz")
    (report,) = read_reports([StepLayout(step)], traces=True).steps
    plain: dict[str, Any] = json.loads(msgspec.json.encode({"merged": merged, "report": report}))
    del plain["report"]["critical_path"]["segments"]
    for advice in plain["report"]["advice"]:
        del advice["what"], advice["do"]
    return plain


def write_expected() -> None:
    for name, step in steps().items():
        expected_path(name).write_text(json.dumps(seen(step), indent=1) + "\n")


def trim(step: Path) -> None:
    """All folders, from a step of the demo."""
    for name in {name.partition("/")[0] for name in steps()}:
        shutil.rmtree(DATA / name)
    aligned = DATA / "aligned" / "step_000002"
    for part in sorted(step.glob("processes/*.json")):
        kept = _trim_spans(next(step.glob(f"spans/{part.stem}.jsonl")), aligned, part)
        record = json.loads(part.read_bytes())
        record["spans"] = kept
        _put(aligned / "processes" / part.name, json.dumps(record))
    for trace in sorted(step.glob("traces/**/*.json.gz")):
        place = aligned / trace.parent.relative_to(step) / trace.name
        _put(place, _trimmed(json.loads(gzip.decompress(trace.read_bytes()))))
        sidecar = trace.with_name(trace.name + ".meta.json")
        _put(place.with_name(sidecar.name), sidecar.read_text())
    _sized(aligned)
    for name, change in SCENARIOS.items():
        shutil.copytree(aligned, DATA / name / "step_000002")
        change(DATA / name / "step_000002")
    overlapping(DATA / "overlapping")


def _sized(step: Path) -> None:
    """Have parts and sidecars say how large the traces are now."""
    sizes = {path.relative_to(step).as_posix(): path.stat().st_size for path in step.rglob("*.json.gz")}
    for path in (*step.glob("processes/*.json"), *step.glob("traces/**/*.meta.json")):
        record = json.loads(path.read_bytes())
        made = [artifact for item in record.get("expected", ()) for artifact in item.get("artifacts", ())]
        for artifact in (*made, *([record["artifact"]] if "artifact" in record else [])):
            artifact["size_bytes"] = sizes.get(artifact["path"], artifact["size_bytes"])
        path.write_text(json.dumps(record))


def _trim_spans(path: Path, to: Path, part: Path) -> int:
    """Only some trajectories; returns how many finished spans are left."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    kept = [line for line in lines if line.get("trajectory") in (None, *_TRAJECTORIES)]
    count = len([line for line in kept if line["kind"] == "span"])
    for line in kept:
        if line["kind"] == "end":
            line["spans"] = count
    _put(to / "spans" / path.name, "".join(json.dumps(line) + "\n" for line in kept))
    return count


def _trimmed(trace: Mapping[str, Any]) -> str:
    """Return all metadata and collectives, some other events, no paths."""
    events = trace["traceEvents"]
    timed = [event for event in events if event["ph"] == "X" and not event["name"].startswith("gloo:")]
    some = {id(event) for event in timed[:: len(timed) // _EVENTS + 1]}
    kept = [
        event
        for event in events
        if event["ph"] == "M" or event["name"].startswith("gloo:") or id(event) in some
    ]
    return json.dumps({**trace, "traceEvents": kept, "traceName": ""})


def _put(path: Path, text: str) -> None:
    """Under the name of a host that is nobody's; gzip without a time, so that it is the same each time."""
    for this, other in _RENAMED.items():
        text = text.replace(this, other)
    path = path.with_name(path.name.replace("_vm_", "_node-a_"))
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def no_clock(step: Path) -> None:
    """The reference worker is on another host, and nobody measured its clock."""
    for path in sorted(step.rglob("*")):
        if not path.is_file():
            continue
        packed = path.suffix == ".gz"
        text = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode()
        text = text.replace("ref_rank0_node-a_", "ref_rank0_node-b_")
        if path.name.startswith("trainer") and path.suffix == ".json":
            record = json.loads(text)
            record["clocks"] = [c for c in record["clocks"] if not c["process"].startswith("ref")]
            text = json.dumps(record)
        if "ref" in (path.name.partition("_")[0], path.parent.name):
            text = text.replace('"node-a"', '"node-b"')
            path.unlink()
            path = path.with_name(path.name.replace("node-a", "node-b"))
            text = text.replace("-of-1_node-a", "-of-1_node-b")
        path.write_bytes(gzip.compress(text.encode(), mtime=0) if packed else text.encode())
    _sized(step)


def rank_unknown(step: Path) -> None:
    """The traces of the actors say nothing of themselves, and have lost their sidecars."""
    for path in step.glob("traces/actor/*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        del trace["distributedInfo"], trace["stepscope"]
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
        path.with_name(path.name + ".meta.json").unlink()
    _sized(step)


def replica_missing(step: Path) -> None:
    """Remove everything that one rollout replica left."""
    for path in [*step.glob("*/rollout_rank1_*"), *step.glob("traces/rollout/replica1/*")]:
        path.unlink()
    (part,) = step.glob("processes/trainer*")
    record = json.loads(part.read_bytes())
    for expectation in record["expected"]:
        if expectation["name"] == "replica 1":
            expectation |= {"state": "missing", "reason": "no answer within 60 s", "artifacts": []}
    part.write_text(json.dumps(record))


def truncated(step: Path) -> None:
    """A full disk: a trace and a file of spans are cut off, and one trace is empty."""
    first, second = sorted(step.glob("traces/actor/*.json.gz"))
    first.write_bytes(first.read_bytes()[:1300])
    second.write_bytes(b"")
    (spans,) = step.glob("spans/rollout_rank0_*")
    spans.write_bytes(spans.read_bytes()[:5000])


SCENARIOS: Mapping[str, Callable[[Path], None]] = {
    "no_clock": no_clock,
    "rank_unknown": rank_unknown,
    "replica_missing": replica_missing,
    "truncated": truncated,
}


def overlapping(run: Path) -> None:
    """Asynchronous RL: while step 5 trains, trajectories begin that step 7 consumes; both are captured."""
    five = StepFolder(run, step=5)
    trainer = five.process("trainer", owner=True)
    loop = five.process("agent_loop")
    actor = five.process("actor", 0)
    trainer.span("update", 100 * MS, 380 * MS, policy_version=5)
    actor.span("update_actor", 110 * MS, 370 * MS, policy_version=5)
    begun = loop.span("trajectory", 200 * MS, 400 * MS, trajectory="t7", step=7, policy_version=4)
    loop.span("turn", 210 * MS, 300 * MS, parent=begun, trajectory="t7", turn=0, step=7, policy_version=4)
    loop.span("turn", 310 * MS, None, parent=begun, trajectory="t7", turn=1, step=7, policy_version=4)
    own = loop.span("trajectory", 0, 90 * MS, trajectory="t5", policy_version=4)
    loop.span("turn", 5 * MS, 85 * MS, parent=own, trajectory="t5", turn=0, policy_version=4)
    for process in (trainer, loop, actor):
        process.close(400 * MS)
    # The next captured step opens before the first one's rollouts have ended: another trainer's window.
    seven = StepFolder(run, step=7, opened_ns=five.opened_ns + 350 * MS)
    trainer = seven.process("trainer", owner=True)
    loop = seven.process("agent_loop", pid=1001)
    actor = seven.process("actor", 0)
    rest = loop.span("trajectory", 60 * MS, 200 * MS, trajectory="t7", policy_version=4,
                     link=five.processes[1].link(begun))  # fmt: skip
    loop.span("turn", 70 * MS, 190 * MS, parent=rest, trajectory="t7", turn=2, policy_version=5)
    trainer.span("update", 200 * MS, 480 * MS, policy_version=6)
    actor.span("update_actor", 210 * MS, 470 * MS, policy_version=6)
    for process in (trainer, loop, actor):
        process.close(500 * MS)
    five.write()
    seven.write()


if __name__ == "__main__":
    if sys.argv[1] == "trim":
        trim(Path(sys.argv[2]))
    write_expected()
