"""Tests of the adapter's version numbers against the source in SGLang's wheels, which is never run."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from stepscope.engines.supported import numbers
from stepscope_sglang._versions import PLUGINS_SINCE, SCOPED_BATCHES_SINCE, SINCE, options_of
from tests.downloads import members, wheel

pytestmark = pytest.mark.slow

VERSIONS = ("0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.14", "0.5.15", "0.5.19")
"""Versions in which an option or a signature of the start first appeared, and some of the versions before."""
_PARTS = ("io_struct", "profiler", "tokenizer")


@cache
def modules(version: str) -> dict[str, ast.Module]:
    """Return the parsed modules about profiling, by name."""
    folder = wheel(f"sglang=={version}") / "sglang" / "srt" / "managers"
    paths = (path for path in folder.rglob("*.py") if any(word in path.stem for word in _PARTS))
    return {path.stem: ast.parse(path.read_text()) for path in paths}


def start_profile(version: str) -> list[str]:
    """Return the parameters of `TokenizerManager.start_profile`."""
    for name in ("tokenizer_control_mixin", "tokenizer_communicator_mixin", "tokenizer_manager"):
        for node in ast.walk(modules(version).get(name, ast.Module([], []))):
            if isinstance(node, ast.AsyncFunctionDef) and node.name == "start_profile":
                return [argument.arg for argument in node.args.args if argument.arg != "self"]
    raise AssertionError(f"sglang {version} has no start_profile")


def fields(version: str, name: str) -> set[str]:
    """Return the annotated fields of a class of `io_struct`."""
    for node in ast.walk(modules(version)["io_struct"]):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                statement.target.id
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            }
    raise AssertionError(f"sglang {version} has no {name}")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_options_of_a_version_are_those_of_the_table(version: str) -> None:
    parameters = start_profile(version)
    known = fields(version, "ProfileReq") - {"req_type"} if parameters == ["req"] else set(parameters)
    assert known == options_of(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_start_is_one_object_from_0_5_15_on(version: str) -> None:
    assert (start_profile(version) == ["req"]) == (numbers(version) >= (0, 5, 15))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stop_disarms_what_it_stops_and_nothing_else_does(version: str) -> None:
    """This is why a short recording is started and stopped to clear an armed start."""
    clears = {
        function.name
        for module in modules(version).values()
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and ast.unparse(node.targets[0]) == "self.profiler_start_forward_ct"
    }
    assert {name.lstrip("_") for name in clears} == {"stop_profile"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_start_that_names_a_pass_takes_at_least_the_next_one(version: str) -> None:
    """This is why every capture sets `start_step` to 1, so that `num_steps` is correct in all versions."""
    text = "\n".join(ast.unparse(module) for name, module in modules(version).items() if "profiler" in name)
    assert "max(start_step, self." in text
    assert "self.profiler_target_forward_ct = self.profiler_start_forward_ct + num_steps" in text


@pytest.mark.parametrize("version", VERSIONS)
def test_names_say_their_axes_in_the_order_in_which_they_are_read(version: str) -> None:
    """This is why `parse_name` reads -TP-, -DP-, -PP-, -EP-. In 0.5.3 names have only -TP-, so a rank may be
    None.
    """
    text = "\n".join(ast.unparse(module) for name, module in modules(version).items() if "profiler" in name)
    axes = re.findall(r"f['\"]([A-Z]{2})-{", text)
    assert axes == (["TP", "DP", "PP", "EP"] if numbers(version) >= (0, 5, 4) else [])
    assert "f'-TP-{" in text


def users_of(version: str, attribute: str) -> set[str]:
    """Return the functions of SGLang's managers that use an attribute of this name."""
    folder = wheel(f"sglang=={version}") / "sglang" / "srt" / "managers"
    texts = (path.read_text() for path in folder.rglob("*.py"))
    return {
        function.name
        for text in texts
        if f".{attribute}" in text
        for function in ast.walk(ast.parse(text))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == attribute
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_count_of_forward_passes_is_shown_to_nobody(version: str) -> None:
    """This is why `iterations.start` needs stepscope's plugin. SGLang only counts, compares and logs it."""
    counted = {"__init__", "init_running_status", "run_batch"}
    compared = {"init_profile", "init_profiler", "_profile_batch_predicate", "update_running_batch"}
    watched = {"watchdog_thread", "create_scheduler_watchdog"}
    logged = {f"{verb}_{stage}_stats" for verb in ("log", "report") for stage in ("prefill", "decode")}
    assert users_of(version, "forward_ct") <= counted | compared | watched | logged


@pytest.mark.parametrize(
    ("version", "scoped"),
    [("0.5.13", False), (SCOPED_BATCHES_SINCE, True), ("0.5.19", True), ("0.5.23", True)],
)
def test_a_batch_is_a_scope_from_0_5_14_on(version: str, scoped: bool) -> None:
    """A stage's profile is stopped, and the next one started, inside this scope."""
    scheduler = ast.parse((members(f"sglang=={version}", [_SCHEDULER]) / _SCHEDULER).read_text())
    (run_batch,) = [
        node for node in ast.walk(scheduler) if isinstance(node, ast.FunctionDef) and node.name == "run_batch"
    ]
    assert "_profile_batch_predicate(batch)" in ast.unparse(run_batch)
    decorators = [ast.unparse(decorator) for decorator in run_batch.decorator_list]
    assert any("scheduler_" in decorator for decorator in decorators) is scoped


def test_every_option_of_the_table_is_in_some_version() -> None:
    assert set(SINCE) == options_of(VERSIONS[-1])


_PLUGINS = "sglang/srt/plugins/__init__.py"
_SCHEDULER = "sglang/srt/managers/scheduler.py"


@pytest.mark.parametrize(
    ("version", "has"), [("0.5.10.post1", False), (PLUGINS_SINCE, True), ("0.5.23", True)]
)
def test_schedulers_load_plugins_from_0_5_11_on(version: str, has: bool) -> None:
    """The plugin needs its caller, and the answer to which it adds the number of passes."""
    folder = members(f"sglang=={version}", [_PLUGINS, _SCHEDULER])
    assert (folder / _PLUGINS).exists() == has
    if not has:
        return
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in (folder / _PLUGINS).read_text()
    scheduler = ast.parse((folder / _SCHEDULER).read_text())
    functions = {
        node.name: ast.unparse(node) for node in ast.walk(scheduler) if isinstance(node, ast.FunctionDef)
    }
    assert "load_plugins()" in functions["run_scheduler_process"]
    assert functions["get_internal_state"].startswith(
        "def get_internal_state(self, recv_req: GetInternalStateReq)"
    )
    assert "self.forward_ct += 1" in functions["run_batch"]
