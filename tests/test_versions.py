"""All distributions have one version and pin each other to it, and never require what is the user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tree import ADAPTERS, CORE, PACKAGES, ROOT, project

VERSION = project(CORE)["version"]
USERS_OWN = {"torch", "ray", "vllm", "sglang", "torch-npu", "nvtx"}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


def every_requirement(table: dict[str, Any]) -> list[str]:
    extras = table.get("optional-dependencies", {}).values()
    return [*table["dependencies"], *(requirement for extra in extras for requirement in extra)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
class TestEveryDistribution:
    def test_has_the_one_version(self, package: Path) -> None:
        assert project(package)["version"] == VERSION

    def test_pins_its_siblings_to_that_version(self, package: Path) -> None:
        named = [r for r in every_requirement(project(package)) if name_of(r).startswith("stepscope")]
        siblings = [r for r in named if not r.startswith("stepscope[")]  # the core's own extras
        assert siblings  # every distribution names another one
        assert {r.partition("==")[2] for r in siblings} == {VERSION}

    def test_requires_nothing_that_is_the_users_own(self, package: Path) -> None:
        required = {name_of(r) for r in project(package)["dependencies"]}
        assert not required & USERS_OWN

    def test_has_types_and_its_licence(self, package: Path) -> None:
        assert [*package.glob("src/*/py.typed")]
        assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()

    def test_starts_at_the_same_python(self, package: Path) -> None:
        assert project(package)["requires-python"] == project(CORE)["requires-python"]


def test_every_adapter_is_an_extra_of_the_core() -> None:
    extras = project(CORE)["optional-dependencies"].values()
    reached = {name_of(requirement) for extra in extras for requirement in extra}
    assert {project(package)["name"] for package in ADAPTERS} <= reached


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_states_the_range_of_its_engine_as_an_extra(package: Path) -> None:
    [engine] = project(package)["optional-dependencies"]["engine"]
    assert re.fullmatch(r"[a-z-]+>=[^,]+,<=[^,]+", engine)


def test_the_changelog_has_a_heading_for_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.count("## [Unreleased]\n") == 1
    assert f"## [{VERSION}]" in text or VERSION == "0.1.0"  # 0.1.0 is what is being written
