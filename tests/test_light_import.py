"""What `import stepscope` loads into a training process, and what reading a run back loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tree import CORE

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
    "stringzilla",
    "asyncio",
}


def loaded_by(statement: str) -> set[str]:
    """Top-level names that `statement` adds to `sys.modules` of a fresh interpreter."""
    program = (
        f"import sys; before = set(sys.modules)\n{statement}\nimport json\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(output))


def test_importing_every_name_loads_nothing_heavy() -> None:
    assert not loaded_by("from stepscope import *") & HEAVY


def test_a_module_that_only_decorates_loads_no_records_and_no_logging() -> None:
    decorated = "import stepscope; stepscope.profile_step(role='actor')(lambda: 1)()"
    assert not loaded_by(decorated) & (HEAVY | {"msgspec", "pathlib", "logging", "dataclasses"})


def test_spans_and_trajectories_outside_a_capture_load_nothing_more() -> None:
    used = "with stepscope.span('a'), stepscope.trajectory('t'), stepscope.turn(0): stepscope.carrier()"
    assert not loaded_by(f"import stepscope\n{used}\n") - loaded_by("import stepscope")


@pytest.mark.parametrize("package", ["stepscope_vllm", "stepscope_sglang", "stepscope_npu"])
def test_importing_an_adapter_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(f"import {package}") & (HEAVY | {"vllm", "sglang", "torch_npu"})


@pytest.mark.parametrize("part", ["files", "timeline", "report", "config"])
def test_reading_a_run_back_needs_no_torch_and_no_ray(part: str) -> None:
    folder = CORE / "src" / "stepscope"
    files = [*(folder / part).rglob("*.py"), *folder.glob(f"{part}.py")]
    dotted = [".".join(file.relative_to(folder.parent).with_suffix("").parts) for file in sorted(files)]
    assert dotted
    assert not loaded_by(f"import {', '.join(dotted)}") & {"torch", "ray"}


def test_the_core_runs_where_torch_and_ray_are_not_installed() -> None:
    absent = "import sys; sys.modules['torch'] = sys.modules['ray'] = None"
    program = f"{absent}; import stepscope; f = stepscope.profile_step(role='actor')(lambda: 3); print(f())"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert output == "3\n"
