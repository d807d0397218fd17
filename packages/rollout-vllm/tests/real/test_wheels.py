"""Tests of the table in the package's README against the source in vLLM's wheels, which is never run.

Run on request, because the tests download for half a minute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import vllm

from stepscope.engines.supported import numbers
from stepscope_vllm._driving import built_settings
from stepscope_vllm._versions import ADDED, dialect_of, leaves_sends_open
from tests.downloads import members

assert vllm  # imported so that these tests run only where vLLM is installed

PAGE = Path(__file__).parents[2] / "README.md"
HEAD = (
    "| vLLM | configured by | kinds | a start takes | its prefix names | workers' files | a second start |\n"
)
RULE = "|---|---|---|---|---|---|---|\n"
RUN = ("0.27.1", "0.29.0", "0.31.0", "0.32.0")
"""Versions that have an environment of their own, in which the other tests run."""
VERSIONS = (
    "0.8.5", "0.10.0", "0.10.2", "0.11.0", "0.11.1", "0.12.0", "0.13.0", "0.15.1", "0.16.0", "0.17.0",
    "0.17.1", "0.18.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
    "0.33.0",
)  # fmt: skip
"""The oldest version, the newest, the versions in `RUN`, and those before and after each known change."""
PARTS = {
    "envs": "vllm/envs.py",
    "config": "vllm/config/profiler.py",
    "async_llm": "vllm/v1/engine/async_llm.py",
    "worker": "vllm/v1/worker/gpu_worker.py",
    "wrapper": "vllm/profiler/wrapper.py",
    "state": "vllm/distributed/parallel_state.py",
}
_PLATFORMS = ("manylinux1_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")
_ANY_LINUX = [word for name in _PLATFORMS for word in ("--platform", name)] + ["--python-version", "3.12"]


@cache
def sources(version: str) -> dict[str, str]:
    """Return the source of each file in `PARTS`; empty for a file that a version lacks."""
    folder = members(f"vllm=={version}", tuple(PARTS.values()), *_ANY_LINUX)
    paths = {name: folder / path for name, path in PARTS.items()}
    return {name: path.read_text() if path.exists() else "" for name, path in paths.items()}


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    with ThreadPoolExecutor(4) as several:
        list(several.map(sources, VERSIONS))


def functions(source: str, owner: str, name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef) and kind.name == owner:
            for statement in kind.body:
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                    yield statement


def takes(version: str) -> list[str]:
    (start,) = functions(sources(version)["async_llm"], "AsyncLLM", "start_profile")
    named = [*start.args.args, *start.args.kwonlyargs]
    return [argument.arg for argument in named if argument.arg != "self"]


def fields(version: str) -> list[str]:
    """Return the fields of `ProfilerConfig`."""
    return [
        statement.target.id
        for kind in ast.walk(ast.parse(sources(version)["config"]))
        if isinstance(kind, ast.ClassDef) and kind.name == "ProfilerConfig"
        for statement in kind.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def variables(version: str) -> set[str]:
    return set(re.findall(r'"(VLLM_(?:TORCH_(?:CUDA_)?PROFILE\w*|PROFILER_\w+))"', sources(version)["envs"]))


def kinds(version: str) -> list[str]:
    if not fields(version):
        return ["torch", *(["cuda"] if built_settings.CUDA_VARIABLE in variables(version) else [])]
    literal = re.search(r"ProfilerKind = Literal\[(.*?)\]", sources(version)["config"])
    assert literal is not None
    return re.findall(r'"(\w+)"', literal[1])


def names_each(version: str) -> bool:
    """Return whether every start sets the names of its worker's files."""
    own = any(functions(sources(version)["wrapper"], "TorchProfilerWrapper", "set_output_name"))
    return own and "self.profiler.set_output_name(" in sources(version)["worker"]


def guarded(version: str) -> bool:
    return "ProfilerAlreadyActiveError" in sources(version)["async_llm"]


def file_names(version: str) -> str:
    worker = sources(version)["worker"]
    if "get_worker_rank_suffix" in worker:
        return "`[prefix_]rank<N>`"
    return "`<instance>-rank-<N>`" if "instance_id}-rank" in worker else "`<host>_<pid>`"


def cells(version: str) -> tuple[str, ...]:
    taken = takes(version)
    prefix = (
        "nothing"
        if "profile_prefix" not in taken
        else "every start"
        if names_each(version)
        else "the first start"
    )
    return (
        "`ProfilerConfig`" if fields(version) else "environment",
        ", ".join(kinds(version)),
        ", ".join(f"`{name}`" for name in taken) or "nothing",
        prefix,
        file_names(version),
        "an error" if guarded(version) else "ignored",
    )


def table() -> str:
    rows: list[tuple[list[str], tuple[str, ...]]] = []
    for version in VERSIONS:
        if not rows or rows[-1][1] != cells(version):
            rows.append(([], cells(version)))
        rows[-1][0].append(f"**{version}**" if version in RUN else version)
    lines = [f"| {' | '.join([', '.join(names), *row])} |\n" for names, row in rows]
    return HEAD + RULE + "".join(lines)


def test_the_page_has_the_table_that_the_wheels_give() -> None:
    assert table() in PAGE.read_text(), f"write this into {PAGE.name}:\n{table()}"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_concluded_from_the_parameters_of_a_start_is_so(version: str) -> None:
    dialect = dialect_of(takes(version))
    prefix = (
        "no"
        if "profile_prefix" not in takes(version)
        else "every start"
        if names_each(version)
        else "first start"
    )
    assert (dialect.prefix, dialect.guarded) == (prefix, guarded(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_releases_whose_stages_leave_sends_open_are_known(version: str) -> None:
    sends = any(functions(sources(version)["state"], "GroupCoordinator", "isend_object"))
    assert leaves_sends_open(version) == sends


@pytest.mark.parametrize("option", sorted(ADDED))
def test_an_option_is_there_from_the_release_on_that_is_named_for_it(option: str) -> None:
    for version in VERSIONS:
        has = {*takes(version), *fields(version), *(["profiler_config"] if fields(version) else [])}
        if option == "cuda":
            has.update(kinds(version))
        elif option in ("delay_iterations", "max_iterations"):
            has = set(takes(version))  # `ProfilerConfig` has the option long before a start takes it
        assert (option in has) == (numbers(version) >= numbers(ADDED[option])), version


@pytest.mark.parametrize("version", [version for version in VERSIONS if numbers(version) < (0, 13)])
def test_the_variables_that_are_set_for_old_releases_are_theirs(version: str) -> None:
    assert built_settings.FOLDER_VARIABLE in variables(version)
    if numbers(version) >= (0, 10, 2):
        assert set(built_settings.VARIABLES.values()) <= variables(version)
