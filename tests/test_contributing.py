"""Files that meet a contributor: the workflow, the hooks before a commit, the forms of an issue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

import dev
from tests.tree import CORE, ROOT, project
from tools.engine_environments import NEWEST, newest_released
from tools.environments import DEV

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(), yaml.BaseLoader)  # `on` stays a word


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_workflow_tests_every_python_that_the_index_is_told_of() -> None:
    job = read(".github/workflows/tests.yml")["jobs"]["core"]
    classified = [line.rpartition(" ")[2] for line in project(CORE)["classifiers"] if ":: 3." in line]
    assert job["strategy"]["matrix"]["python"] == classified


def test_the_environment_of_uv_has_the_tests_and_the_linters_and_no_torch() -> None:
    settings = tomli.loads((ROOT / "pyproject.toml").read_text())
    groups = settings["tool"]["uv"]["default-groups"]
    required = [line for name in groups for line in settings["dependency-groups"][name]]
    names = {re.split(r"[>=\[]", line)[0] for line in required}
    assert {"pytest", "ruff", "mypy"} <= names
    assert not {"torch", "ray"} & names


def test_what_the_workflow_runs_exists() -> None:
    jobs = [job for file in WORKFLOWS for job in read(f".github/workflows/{file.name}")["jobs"].values()]
    for job in jobs:
        words = commands(job)
        assert set(re.findall(r"dev\.py (\w+)", words)) <= set(dev.COMMANDS)
        assert all(
            (ROOT / path).exists() for path in re.findall(r"(?<!\S)(?:packages/\w+/)?tests/\w+\.py", words)
        )


def test_the_weekly_job_tries_the_newest_of_everything_that_has_a_newest() -> None:
    workflow = read(".github/workflows/newest.yml")
    [job] = workflow["jobs"].values()
    assert set(job["strategy"]["matrix"]["name"]) == set(NEWEST)
    assert "dev.py test --newest ${{ matrix.name }}" in commands(job)
    assert workflow["on"]["schedule"]


def test_each_newest_has_tests() -> None:
    for name in NEWEST:
        files = newest_released(name).tests
        assert files, name
        assert all(path.exists() for path in files)


def test_the_hooks_before_a_commit_call_the_tools_of_the_environment() -> None:
    [repository] = read(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert repository["repo"] == "local"
    assert all(entry.startswith(f"{DEV.folder.name}/bin/python -m ruff ") for entry in entries)


def test_a_report_of_a_bug_asks_what_the_doctor_says() -> None:
    form = read(".github/ISSUE_TEMPLATE/bug.yml")
    [doctor] = [part for part in form["body"] if part["id"] == "doctor"]
    assert "`stepscope doctor --json`" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"] == "true"


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_form_has_what_the_page_of_issues_needs(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)) > 1
    assert {part["type"] for part in form["body"]} == {"textarea"}


def test_every_path_in_the_page_for_contributors_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:packages|tests|tools|docs|\.github|\.ci)/[^`\s<*]+)`", page))
    assert len(paths) > 3
    assert not [path for path in paths if not Path(ROOT, path).exists()]
