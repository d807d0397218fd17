"""Extensions of a package outside of the repository, installed as pip installs it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("hatchling")
SOURCE = Path(__file__).parent / "third_party"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip installed the toy package, from a copy of its sources."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(SOURCE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(folder / "installed"), str(folder / "source")]
    subprocess.run(command, check=True, timeout=300)
    return folder / "installed"


def python(installed: Path, *arguments: str) -> str:
    """Run Python with the toy package; return its output."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(installed)]).strip(os.pathsep)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one step, captured by the toy backend and the toy adapter."""
    folder = tmp_path_factory.mktemp("run")
    python(installed, str(SOURCE / "train.py"), str(folder))
    return folder


@pytest.fixture(scope="module")
def report(installed: Path, run: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        python(installed, "-m", "stepscope", "report", "--json", str(run / "step_000001"))
    )
    step: dict[str, Any] = answer["steps"][0]
    return step


def sidecars(run: Path) -> dict[str, dict[str, Any]]:
    paths = run.glob("step_000001/traces/**/*.meta.json")
    artifacts = [json.loads(path.read_bytes())["artifact"] for path in paths]
    return {f"{artifact['tool']} {artifact['kind']}": artifact for artifact in artifacts}


def test_the_trace_of_a_step_comes_from_the_installed_backend(run: Path) -> None:
    trace = run / "step_000001" / sidecars(run)["toy toy_trace"]["path"]
    assert [line.split()[0] for line in trace.read_text().splitlines()] == ["generate", "learn"]


def test_an_engine_is_recorded_by_the_installed_adapter(run: Path) -> None:
    trace = run / "step_000001" / sidecars(run)["toy torch_trace"]["path"]
    names = [event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]]
    assert names == ["toy pass: 3 + 0", *["toy pass: 0 + 3"] * 3]


def test_the_installed_adapter_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    shutil.copy(SOURCE / "conformance.py", tmp_path / "test_conformance.py")
    output = python(
        installed, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)
    )
    assert " passed" in output


def test_the_versions_of_the_adapters_engine_are_in_the_runs_record(run: Path) -> None:
    assert "msgspec" in json.loads((run / "run.json").read_bytes())["versions"]


def test_the_engines_annotations_are_counted_as_iterations(report: dict[str, Any]) -> None:
    (engine,) = report["engines"]
    assert (engine["source"], engine["iterations"]) == ("iterations", 4)


def test_a_file_is_read_by_the_installed_reader(installed: Path, run: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json.gz"
    python(installed, "-m", "stepscope", "merge", str(run / "step_000001"), "-o", str(timeline))
    names = {event.get("name") for event in json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]}
    assert {"toy generate", "toy learn"} <= names


def test_a_report_has_the_installed_section(report: dict[str, Any]) -> None:
    assert "toy stage learn" in json.dumps(report["added"])


def test_doctor_compares_the_engine_with_the_adapters_range(installed: Path) -> None:
    code = (
        "from stepscope_report.cli.doctor import engines\n"
        "print([(row.state, row.found) for row in engines() if row.subject == 'toy'])"
    )
    assert "msgspec 0.1 to 0.2" in python(installed, "-c", code)


COUNTED = """
import sys, threading
from toy_profiler import counters
from stepscope import ProfileConfig, capture

asked = threading.Event()
sample = counters.Queue.sample

def noted(self):
    asked.set()
    return sample(self)

counters.Queue.sample = noted
settings = {"save_path": sys.argv[1], "steps": [1], "roles": {"*": {"profiler": "off"}}}
with capture(1, config=ProfileConfig.from_mapping(settings)):
    assert asked.wait(60)
"""


def test_an_installed_counter_is_sampled_and_a_broken_one_is_named(installed: Path, tmp_path: Path) -> None:
    python(installed, "-c", COUNTED, str(tmp_path))
    (lines,) = (path.read_text().splitlines() for path in tmp_path.glob("step_000001/counters/*"))
    assert any('"toy queue"' in line for line in lines)
    (part,) = (json.loads(path.read_bytes()) for path in tmp_path.glob("step_000001/processes/*.json"))
    notes = [note for item in part["expected"] for note in item["notes"]]
    assert "'broken': ImportError: libtoy" in str(notes)
