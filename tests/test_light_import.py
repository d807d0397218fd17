"""Modules that `import stepscope` loads into a training process, and that reading a run loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tree import CORE, REPORT, imports

HEAVY = {
    "torch",
    "ray",
    "wrapt",
    "typer",
    "rich",
    "numpy",
    "httpx",
    "jinja2",
    "plotly",
    "yaml",
    "isal",
    "psutil",
    "pynvml",
    "stringzilla",
    "asyncio",
}


def modules_of(statement: str) -> set[str]:
    """Names that `statement` adds to `sys.modules` of a fresh interpreter."""
    program = (
        f"import sys; before = set(sys.modules)\n{statement}\nimport json\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(output.splitlines()[-1]))


def loaded_by(statement: str) -> set[str]:
    """Top-level names that `statement` adds to `sys.modules` of a fresh interpreter."""
    return {name.partition(".")[0] for name in modules_of(statement)}


def test_importing_every_name_loads_nothing_heavy() -> None:
    slow = {"ctypes", "email", "pickle"}  # `importlib.metadata` imports email
    assert not loaded_by("from stepscope import *") & (HEAVY | slow)


def test_a_module_that_only_decorates_loads_no_records_and_no_logging() -> None:
    decorated = "import stepscope; stepscope.profile_step(role='actor')(lambda: 1)()"
    assert not loaded_by(decorated) & (HEAVY | {"msgspec", "pathlib", "logging", "dataclasses"})


def test_spans_and_trajectories_outside_a_capture_load_nothing_more() -> None:
    used = "with stepscope.span('a'), stepscope.trajectory('t'), stepscope.turn(0): stepscope.carrier()"
    assert not loaded_by(f"import stepscope\n{used}\n") - loaded_by("import stepscope")


@pytest.mark.parametrize("package", ["stepscope_vllm", "stepscope_sglang", "stepscope_npu"])
def test_importing_an_adapter_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(f"import {package}") & (HEAVY | {"vllm", "sglang", "torch_npu"})


@pytest.mark.parametrize("part", [CORE / "src/stepscope/files", CORE / "src/stepscope/config", REPORT])
def test_reading_a_run_back_needs_no_torch_and_no_ray(part: Path) -> None:
    left_out = {"cli", "demo", "doctor", "testing.py", "writers", "tests"}  # what does more than to read
    files = [path for path in sorted(part.rglob("*.py")) if not left_out & set(path.parts)]
    source = (part if part == REPORT else CORE) / "src"
    dotted = [".".join(file.relative_to(source).with_suffix("").parts) for file in files]
    assert dotted
    assert not loaded_by(f"import {', '.join(dotted)}") & {"torch", "ray"}


def test_the_core_runs_where_torch_and_ray_are_not_installed() -> None:
    absent = "import sys; sys.modules['torch'] = sys.modules['ray'] = None"
    program = f"{absent}; import stepscope; f = stepscope.profile_step(role='actor')(lambda: 3); print(f())"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert output == "3\n"


WITHOUT_COMMAND = """
import sys
from importlib.abc import MetaPathFinder

class Refusal(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"typer", "rich", "stringzilla", "click"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
"""
"""Makes an interpreter one that lacks what the command imports."""


def without_command(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_COMMAND + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_step_is_captured_and_reported_without_the_command(tmp_path: Path) -> None:
    outcome = without_command(
        """
import stepscope
from stepscope_report import step_report
from stepscope_report.timeline import load_step

stepscope.configure(save_path=sys.argv[1], steps=[1], roles={"*": {"profiler": "off"}})
with stepscope.capture(1) as capture, stepscope.span("tool"):
    pass
stepscope.flush()
print(step_report(load_step(capture.result.path)).breakdown)
""",
        str(tmp_path),
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "tool" in outcome.stdout


def test_figures_after_a_capture_need_no_command(tmp_path: Path) -> None:
    outcome = without_command(
        """
from stepscope.testing.steps import StepFolder
from stepscope_report import writers

folder = StepFolder(sys.argv[1], step=2, run_id="run1")
driver = folder.process("trainer", owner=True)
driver.span("rollout", 0, 8_000_000)
driver.close(10_000_000)
folder.write()
print(writers.main(sys.argv[1], "2", "run1", ""))
""",
        str(tmp_path / "run"),
    )
    assert outcome.stdout == "0\n", outcome.stderr
    assert list((tmp_path / "run" / "step_000002").glob("scalars_*.json"))


def test_a_report_on_traces_loads_neither_pydantic_nor_openssl(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('[{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]')
    program = f"""
from contextlib import redirect_stdout
from io import StringIO
from stepscope_report.cli import run
with redirect_stdout(StringIO()) as output:
    run(["report", {str(trace)!r}, "--jobs", "1"])
assert "aten::mm" in output.getvalue()
"""
    assert not loaded_by(program) & {"pydantic", "_hashlib"}


def test_a_command_loads_no_module_of_another_command() -> None:
    """`why` answers within 2 s beside a busy run, and the modules of reports take half a second of CPU."""
    modules = modules_of("from stepscope_report.cli import run; run(['why', '-h'])")
    assert "stepscope_report.cli.why" in modules
    assert not modules & {"stepscope_report.cli.report", "stepscope_report.timeline", "rich.progress"}


ASKED = """
import sys
from pathlib import Path

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print(len([*Path(sys.argv[1]).rglob("*.json")]))

sys.meta_path.insert(0, Finder())
from stepscope_report.cli import run
run(["why", *sys.argv[1:]])
print([*Path(sys.argv[1]).rglob("*.json")])
"""
"""Prints the number of orders in a run when the command line is imported, and the orders that are left."""


@pytest.mark.parametrize(("words", "orders"), [(["--wait", "0.1"], 1), (["-h"], 0), (["--wat"], 1)])
def test_why_asks_the_run_before_the_command_line_is_imported(
    tmp_path: Path, words: list[str], orders: int
) -> None:
    program = [sys.executable, "-c", ASKED, str(tmp_path), *words]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (lines[0], lines[-1]) == (str(orders), "[]")


def test_only_the_command_and_what_it_prints_import_what_it_prints_with() -> None:
    extra = {"typer", "rich"}
    importers = {entry.module for entry in imports(REPORT) if entry.target.partition(".")[0] in extra}
    allowed = ("stepscope_report.cli.", "stepscope_report.terminal")
    assert not [module for module in importers if not module.startswith(allowed)]
