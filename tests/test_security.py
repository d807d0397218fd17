"""Things that no code here does with files that it reads, and the permissions of files that it writes."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture, flush, span
from stepscope_report.cli.app import run
from tests.tree import PACKAGES, ROOT, imports

UNPICKLE = {"dill", "cloudpickle", "shelve", "joblib", "jsonpickle"}
"""Modules that turn data into objects of any class, and so into code. Of pickle the writing half is used."""
LOADS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "np.load", "numpy.load"}
RUNS_CODE = {"eval", "exec", "compile", "__import__", "marshal.load", "marshal.loads"}
KNOWN = {
    # Wrappers written for the signature of the function that is decorated.
    ("packages/core/src/stepscope/_recording/spans/wrapping.py", "exec"),
    ("packages/core/src/stepscope/_recording/spans/wrapping.py", "compile"),
    # The class that the running engine's own configuration names, and has imported in its workers.
    ("packages/rollout-vllm/src/stepscope_vllm/_driving/in_process.py", "__import__"),
}
LISTENS = ("socketserver", "http.server", "wsgiref", "xmlrpc.server")


@cache
def calls() -> tuple[tuple[str, str], ...]:
    """Return (place, function) of every call in the sources of the four distributions."""
    return tuple(_calls())


def _calls() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for file in sorted((package / "src").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func)


@pytest.mark.slow
def test_nothing_unpickles() -> None:
    imported = [
        str(entry)
        for package in PACKAGES
        for entry in imports(package)
        if entry.target.partition(".")[0] in UNPICKLE or entry.target in LOADS
    ]
    called = [f"{where} calls {what}" for where, what in calls() if what in LOADS]
    assert not imported + called


def test_no_content_of_a_file_is_run_as_code() -> None:
    runners = {(where.partition(":")[0], what) for where, what in calls() if what in RUNS_CODE}
    assert runners == KNOWN


def test_yaml_makes_plain_values_alone() -> None:
    loads = [(where, what) for where, what in calls() if what.startswith("yaml.") and "load" in what]
    assert [where.partition(":")[0] for where, _ in loads] == [
        "packages/core/src/stepscope/config/_yaml.py"
    ], "read YAML there: its loader is a SafeLoader"


def test_no_port_listens_and_one_socket_answers_its_user() -> None:
    imported = [
        str(entry)
        for package in PACKAGES
        for entry in imports(package)
        if entry.target.startswith(tuple(LISTENS))
    ]
    called = [
        f"{where} calls {what}"
        for where, what in calls()
        if what.rpartition(".")[2] in ("listen", "create_server", "start_server", "start_unix_server")
        and what != "pass_socket.listen"
    ]
    passes = "packages/core/src/stepscope/engines/pass_socket.py"
    assert not imported
    assert [where.partition(":")[0] for where in called] == [passes]
    text = (ROOT / passes).read_text()
    assert text.index("socket.socket(socket.AF_UNIX)") < text.index(".listen()") < text.index("def _answer(")
    assert "SO_PEERCRED" in text


@pytest.mark.needs("torch")
def test_no_file_of_a_run_is_anybody_elses_to_read(tmp_path: Path) -> None:
    """Spans, traces and pages may hold prompts."""
    root = tmp_path / "run"
    config = ProfileConfig.from_mapping(
        {
            "save_path": str(root),
            "steps": [1],
            "torch": {"activities": ["cpu"]},
            "finish": {"command": "true"},
        }
    )
    before = os.umask(0o022)
    try:
        with capture(1, config=config) as block, span("turn", attrs={"prompt": "mine"}):
            pass
        block.result.wait()
        flush()
        step = str(root / "step_000001")
        for command in (["report", str(root)], ["merge", step]):
            assert run(command) in (0, 3)
        assert run(["trigger", str(root), "--wait", "0"]) in (0, 3)
    finally:
        os.umask(before)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [str(path) for path in files if path.stat().st_mode & 0o077] == []
