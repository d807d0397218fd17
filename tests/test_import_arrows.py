"""Permitted imports: fleet -> recording -> backends, engines -> files, config -> errors, and
cli -> report -> timeline -> files; the online and the offline half meet in `files` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tree import ADAPTERS, CORE, Import, imports

ONLINE = {"recording", "backends", "engines", "fleet"}
OFFLINE = {"timeline", "report"}
ON_DISK = {"files", "config", "errors"}

MAY_IMPORT = {
    "errors": set[str](),
    "switch": set[str](),
    "config": {"errors"},
    "counters": {"files"},
    "files": {"errors"},
    "backends": ON_DISK,
    "engines": ON_DISK | {"backends", "counters"},
    "recording": ON_DISK | {"backends", "counters", "engines", "switch"},
    "fleet": ON_DISK | {"backends", "engines", "recording"},
    "timeline": {"files", "errors"},
    "report": {"files", "errors", "timeline"},
    "compat": {"config", "errors", "recording", "switch"},
    "doctor": {"errors", "config", "recording", "engines", "switch"},
    "integrations": {"compat", "config", "errors", "recording", "switch"},
    "writers": {"config", "files", "errors", "timeline", "report"},
    "startup": {"recording"},
    "cli": ON_DISK | OFFLINE | {"writers", "demo", "doctor", "switch", "__init__"},
    "__init__": {"config", "errors", "recording", "integrations", "report"},
    "__main__": {"cli"},
}
"""Part of the core -> other parts it may import. `demo` and `testing` may import anything that is public."""

PUBLIC = (
    {
        f"stepscope.{name}"
        for name in (
            "errors",
            "switch",
            "config",
            "counters",
            "engines",
            "backends",
            "doctor",
            "testing",
            "timeline.readers",
            "writers",
        )
    }
    | {
        f"stepscope.engines.{name}"
        for name in ("artifacts", "fetch", "http", "metrics", "own_thread", "supported")
    }
    | {f"stepscope_report.demo.{name}" for name in ("engine_replica", "model", "task")}
    | {
        f"stepscope.backends.{name}"
        for name in (
            "process_lock",
            "threaded.mini_batches",
            "threaded.scheduled_window",
            "threaded.threaded_window",
            "threaded.window_thread",
            "torch.foreign_sessions",
            "torch.record_function_scopes",
        )
    }
)
"""Modules that an adapter may import, in addition to `stepscope` itself and those in `stepscope.files`."""

OWN_IMPORTS = [entry for entry in imports(CORE) if entry.target.split(".")[0] == "stepscope"]


def part_of(module: str) -> str:
    """Return the part of the core of a module or name; `__init__` for `stepscope` and its names."""
    name = module.partition(".")[2].partition(".")[0]
    return name if (CORE / "src/stepscope" / name).is_dir() or name in MAY_IMPORT else "__init__"


def test_every_part_of_the_core_has_its_arrows_written_down() -> None:
    folder = CORE / "src" / "stepscope"
    parts = {
        path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts <= {*MAY_IMPORT, "demo", "testing", "__main__"}


def test_imports_inside_the_core_follow_the_arrows() -> None:
    wrong = [entry for entry in OWN_IMPORTS if part_of(entry.module) in MAY_IMPORT and not allowed(entry)]
    assert not wrong, "\n".join(map(str, wrong))


def allowed(entry: Import) -> bool:
    source, target = part_of(entry.module), part_of(entry.target)
    return source == target or target in MAY_IMPORT[source]


@pytest.mark.parametrize(("half", "other"), [(ONLINE, OFFLINE), (OFFLINE, ONLINE)], ids=["online", "offline"])
def test_the_two_halves_never_import_each_other(half: set[str], other: set[str]) -> None:
    wrong = [
        entry for entry in OWN_IMPORTS if part_of(entry.module) in half and part_of(entry.target) in other
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("part", ["demo", "testing"])
def test_demo_and_testing_import_what_is_public(part: str) -> None:
    wrong = [
        entry
        for entry in OWN_IMPORTS
        if part_of(entry.module) == part
        and part_of(entry.target) != part
        and any(name.startswith("_") for name in entry.target.split(".")[1:])
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_imports_the_public_core_only(package: Path) -> None:
    wrong = [
        entry
        for entry in imports(package)
        if entry.target.startswith("stepscope.") and not public(entry.target)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def public(target: str) -> bool:
    module, _, name = target.rpartition(".")
    if name.startswith("_"):
        return False
    return (
        target in PUBLIC or module in PUBLIC or module == "stepscope" or module.startswith("stepscope.files")
    )
