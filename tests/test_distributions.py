"""Contents of the published wheels, and their requirements."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tree import ADAPTERS, CORE, PACKAGES, REPORT, ROOT, files, imports, project


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda path: path.name)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    return built(request.param, tmp_path_factory.mktemp("wheel"))


def built(package: Path, folder: Path) -> zipfile.Path:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=package, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return zipfile.Path(file)


@pytest.mark.slow
def test_a_wheel_holds_one_typed_package_and_the_licence(wheel: zipfile.Path) -> None:
    [package] = [path for path in wheel.iterdir() if not path.name.endswith(".dist-info")]
    [info] = [path for path in wheel.iterdir() if path.name.endswith(".dist-info")]
    assert (package / "py.typed").exists()
    assert (info / "licenses" / "LICENSE").exists()
    assert "Requires-Python: >=3.10" in (info / "METADATA").read_text()


def test_a_wheel_holds_every_file_of_its_package(wheel: zipfile.Path) -> None:
    [package] = [path for path in wheel.iterdir() if not path.name.endswith(".dist-info")]
    [source] = [path / "src" for path in PACKAGES if (path / "src" / package.name).is_dir()]
    inside = {str(file.relative_to(source)) for file in files() if file.is_relative_to(source)}
    assert inside <= set(wheel.root.namelist())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_what_a_distribution_registers_is_there(package: Path) -> None:
    table = project(package)
    groups = [table.get("scripts", {}), *table.get("entry-points", {}).values()]
    for reference in (value for group in groups for value in group.values()):
        module, _, name = reference.partition(":")
        defined = defined_in(package / "src", module)
        assert not name or name in defined, reference  # without a name, the module is the entry


def defined_in(source: Path, module: str) -> set[str]:
    """Return the top-level names of a module by its source: torch may be absent."""
    path = source / module.replace(".", "/")
    body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return defined | {alias.asname or alias.name for alias in imported} | set(map(ast.unparse, targets))


def test_the_wheel_of_the_sdk_records_and_does_nothing_else(tmp_path: Path) -> None:
    wheel = built(CORE, tmp_path)
    parts = {name.split("/")[1] for name in wheel.root.namelist() if name.startswith("stepscope/")} - {""}
    folders = {"_recording", "backends", "config", "engines", "files", "integrations", "testing"}
    assert parts == folders | {"__init__.py", "__main__.py", "errors.py", "py.typed"}
    [info] = [path for path in wheel.iterdir() if path.name.endswith(".dist-info")]
    assert "console_scripts" not in (info / "entry_points.txt").read_text()


def test_the_sdk_requires_four_packages_and_the_report_three_more() -> None:
    required = {"msgspec", "pyyaml", "wrapt", "isal"}
    assert names(project(CORE)["dependencies"]) == required
    more = {"stepscope", "typer", "rich", "stringzilla"}
    assert names(project(REPORT)["dependencies"]) == (required - {"wrapt"}) | more


def test_extras_that_the_report_needs_bring_the_report_with_that_extra() -> None:
    table, core = project(REPORT), project(CORE)["optional-dependencies"]
    pin = f"=={table['version']}"
    assert core["cli"] == [f"stepscope-report{pin}"]
    brought = {name: lines for name, lines in core.items() if lines[0].startswith("stepscope-report[")}
    assert brought == {name: [f"stepscope-report[{name}]{pin}"] for name in table["optional-dependencies"]}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("package", [path for path in PACKAGES if path != CORE], ids=lambda path: path.name)
def test_an_empty_adapter_registers_nothing(package: Path) -> None:
    sources = [file for file in (package / "src").rglob("*.py") if file.name != "__init__.py"]
    assert sources or "entry-points" not in project(package)


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_requires_what_it_imports_and_not_its_engine(package: Path) -> None:
    table = project(package)
    required = modules(table["dependencies"])
    engines = modules(table["optional-dependencies"]["engine"])
    own = {path.name for path in (package / "src").iterdir()}
    imported = {entry.target.partition(".")[0] for entry in imports(package)}
    # An engine brings torch, and what imports the report is loaded by the report alone.
    theirs = own | engines | {"torch", "stepscope_report"}
    assert imported - theirs - sys.stdlib_module_names == required
    assert not engines & required


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_extra_of_the_sdk_brings_an_adapter_alone(package: Path) -> None:
    table = project(package)
    extras = project(CORE)["optional-dependencies"].values()
    brought = [lines for lines in extras if any(table["name"] in line for line in lines)]
    assert brought == [[f"{table['name']}=={table['version']}"]]


def modules(requirements: list[str]) -> set[str]:
    return {name.replace("-", "_") for name in names(requirements)}


MODULES = {"pyyaml": "yaml", "mlflow-skinny": "mlflow", "nvidia-ml-py": "pynvml"}
"""Requirement -> its module, where the name is another."""
OF_THE_USERS_PROGRAM = {
    CORE: {
        "torch",
        "typing_extensions",  # torch requires it; ours is for type checkers
        "omegaconf",  # verl and Hydra require it
        "hydra",
        "lightning",
        "pytorch_lightning",
        "transformers",
        "pytest",  # stepscope.testing
        "stepscope_report",  # an extra brings it
    },
    REPORT: {
        "torch",
        "ray",
        "safetensors",  # vLLM and SGLang require it
        "pandas",
        "polars",
        "pytest",  # stepscope_report.testing
    },
}
"""Imported only where a program has them already, so that no extra brings them."""
BY_NAME = {"stringzilla", "pynvml"}
"""Loaded without an import statement."""


@pytest.mark.parametrize("package", OF_THE_USERS_PROGRAM, ids=lambda path: path.name)
def test_the_core_and_the_report_declare_what_they_import(package: Path) -> None:
    table = project(package)
    extras = table["optional-dependencies"].values()
    lines = [line for lines in (table["dependencies"], *extras) for line in lines]
    required = names([line for line in lines if package == REPORT or not line.startswith("stepscope")])
    declared = {MODULES.get(name, name.partition("-")[0]) for name in required}
    [own] = [path.name for path in (package / "src").iterdir()]
    imported = {entry.target.partition(".")[0] for entry in imports(package)}
    imported -= {own, *sys.stdlib_module_names}
    assert imported - OF_THE_USERS_PROGRAM[package] == declared - BY_NAME
    assert imported >= OF_THE_USERS_PROGRAM[package]


def test_the_extra_all_is_every_other_one() -> None:
    extras = project(CORE)["optional-dependencies"]
    assert extras["all"] == [f"stepscope[{','.join(name for name in extras if name != 'all')}]"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_page_on_the_index_links_to_pages_that_exist(package: Path) -> None:
    home = project(package)["urls"]["Homepage"]
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (package / "README.md").read_text())
    assert links
    # the index shows the page without its neighbours
    assert all(link.startswith("https://") for link in links)
    ours = [
        re.sub(r"^/(?:blob|tree)/main/", "", link.removeprefix(home)) for link in links if home + "/" in link
    ]
    assert not [path for path in ours if not (ROOT / path).exists()]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_index_is_told_where_the_project_is_and_who_may_use_it(package: Path) -> None:
    table, core = project(package), project(CORE)
    assert table["urls"] == core["urls"]
    assert set(table["urls"]) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert table["authors"] == core["authors"]
    assert table["classifiers"] == core["classifiers"]
    pythons = [line.rpartition(" ")[2] for line in table["classifiers"] if ":: 3." in line]
    assert pythons == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert {"rl", "rlhf", "grpo", "profiler", "perfetto"} <= set(table["keywords"])
