"""Permitted imports: inside the core, inside the report, between the two, and of adapters.

Recording and reading meet in `stepscope.files`, which says what lies on disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tree import ADAPTERS, CORE, REPORT, Import, imports, project

ON_DISK = {"files", "config", "errors"}

CORE_ARROWS = {
    "errors": set[str](),
    "config": {"errors"},
    "files": {"errors"},
    "backends": ON_DISK,
    "engines": ON_DISK | {"backends"},
    "_recording": ON_DISK | {"backends", "engines"},
    "integrations": {"config", "errors", "files", "_recording"},
    "testing": ON_DISK | {"backends", "engines", "_recording"},
    "__init__": {"config", "errors", "files", "_recording", "integrations"},
    "__main__": {"_recording"},
}
"""Part of the core -> other parts that it may import."""
READS_THE_REPORT = {"__main__"}
"""Parts of the core that import the report, if it is installed."""

TABLES = {
    *(
        "accounting",
        "division",
        "replicas",
        "stragglers",
        "suspects",
        "spans",
        "table",
    ),
    *("model", "sections", "report", "advice", "whatif", "diff", "gate"),
    *(
        "groups",
        "live",
        "near",
        "holds",
        "event_loops",
        "plain",
        "opened",
        "waiting",
        "why",
        "formatting",
    ),
    *("brief", "charts", "html", "terminal", "terminal_blocks", "__init__"),
}
"""Parts of the report that compute tables, and draw them."""
REPORT_ARROWS = {
    "timeline": {"accounting"},
    **{part: {"timeline", *TABLES} for part in TABLES},
    "writers": {"timeline", *TABLES},
    "doctor": {"formatting"},
    "demo": set[str](),
    "testing": {"timeline"},
    "cli": {"timeline", "writers", "doctor", "demo", *TABLES},
}
"""Part of the report -> other parts that it may import."""

FOR_ADAPTERS = {"config", "files", "backends", "engines", "errors", "testing"}
"""Parts of the core that an adapter may import, in addition to the names of `stepscope` itself."""
OF_THE_REPORT = {"doctor", "demo", "timeline.readers"}
"""Parts of the report with contracts for other packages."""
REPORT_GROUPS = (
    "analysers",
    "doctor",
    "iterations",
    "readers",
    "report_sections",
    "writers",
)
"""Entry points that the report loads: no module behind them is imported in a training."""


def inside(package: Path, name: str) -> list[Import]:
    return [entry for entry in imports(package) if entry.target.split(".")[0] == name]


def part_of(module: str, arrows: dict[str, set[str]]) -> str:
    """Return the part of a module or name; `__init__` for the package itself and its names."""
    name = module.partition(".")[2].partition(".")[0]
    return name if name in arrows else "__init__"


BOTH = [(CORE, "stepscope", CORE_ARROWS), (REPORT, "stepscope_report", REPORT_ARROWS)]


@pytest.mark.parametrize(("package", "name", "arrows"), BOTH, ids=["core", "report"])
def test_every_part_has_its_arrows_written_down(
    package: Path, name: str, arrows: dict[str, set[str]]
) -> None:
    folder = package / "src" / name
    parts = {
        path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts == set(arrows)


@pytest.mark.parametrize(("package", "name", "arrows"), BOTH, ids=["core", "report"])
def test_imports_inside_a_package_follow_the_arrows(
    package: Path, name: str, arrows: dict[str, set[str]]
) -> None:
    wrong = [
        entry
        for entry in inside(package, name)
        for source, target in [(part_of(entry.module, arrows), part_of(entry.target, arrows))]
        if source != target and target not in arrows[source]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_core_imports_the_report_in_one_place() -> None:
    wrong = [
        entry
        for entry in inside(CORE, "stepscope_report")
        if part_of(entry.module, CORE_ARROWS) not in READS_THE_REPORT
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_report_imports_nothing_private_of_the_core() -> None:
    wrong = [entry for entry in inside(REPORT, "stepscope") if is_private(entry.target)]
    assert not wrong, "\n".join(map(str, wrong))


def is_private(target: str) -> bool:
    return any(name.startswith("_") for name in target.split("."))


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_imports_the_public_core_only(package: Path) -> None:
    wrong = [entry for entry in inside(package, "stepscope") if not is_for_adapters(entry.target)]
    assert not wrong, "\n".join(map(str, wrong))


def is_for_adapters(target: str) -> bool:
    _, part, *below = target.split(".")
    return not is_private(target) and (part in FOR_ADAPTERS or (not below and part not in CORE_ARROWS))


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_imports_contracts_of_the_report_only(package: Path) -> None:
    wrong = [entry for entry in inside(package, "stepscope_report") if not is_contract(entry.target)]
    assert not wrong, "\n".join(map(str, wrong))


def is_contract(target: str) -> bool:
    inner = target.removeprefix("stepscope_report.")
    return not is_private(target) and any(f"{inner}.".startswith(f"{part}.") for part in OF_THE_REPORT)


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_what_a_training_loads_of_an_adapter_needs_no_report(package: Path) -> None:
    loaded = loaded_in_a_training(package)
    wrong = [entry for entry in inside(package, "stepscope_report") if entry.module in loaded]
    assert loaded
    assert not wrong, "\n".join(map(str, wrong))


def loaded_in_a_training(package: Path) -> set[str]:
    """Return the modules behind entry points that the report does not load, and all that they import."""
    groups = project(package)["entry-points"].items()
    points = [points for group, points in groups if group.removeprefix("stepscope.") not in REPORT_GROUPS]
    new = {value.partition(":")[0] for registered in points for value in registered.values()}
    loaded: set[str] = set()
    while new:
        loaded |= new
        targets = [entry.target for entry in imports(package) if entry.module in new]
        new = {module for target in targets for module in (target, target.rpartition(".")[0])} - loaded
    return loaded
