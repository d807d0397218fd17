"""Tests of the errors if torch_npu is absent, broken, or finds no NPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope import ProfileConfig, capture
from stepscope.errors import BackendError
from stepscope_npu import _versions
from stepscope_npu._backend import NpuBackend

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Yield a function that makes an importable torch_npu from {path: text}."""
    before = set(sys.modules)

    def install(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "torch_npu" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "torch_npu":
            del sys.modules[name]


def test_without_torch_npu_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(BackendError, match="install torch-npu"):
        _versions.load()


@pytest.mark.parametrize(("imported", "state"), [(True, "failed"), (False, "skipped")])
def test_a_process_with_torch_and_without_torch_npu_is_not_called_complete(
    imported: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(
        "stepscope._recording.session.session.load_backend", lambda tool, config: NpuBackend(config)
    )
    config = ProfileConfig(save_path=tmp_path, steps=[1], tool="npu")
    monkeypatch.setattr("stepscope._recording.capture.configure.check_tool", lambda config: None)
    with monkeypatch.context() as patch:
        if imported:
            patch.setitem(sys.modules, "torch", torch)
        else:
            patch.delitem(sys.modules, "torch")
        with capture(1, config=config) as cap:
            pass
    manifest = cap.result.wait()
    assert manifest is not None
    (item,) = [item for part in manifest.processes for item in part.expected if item.name == "npu trace"]
    assert (item.state, manifest.state) == (state, "failed" if imported else "ok")
    message = "torch_npu is not installed here" if imported else "torch_npu is not imported in this process"
    assert message in str(item.reason)


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("raise OSError('libhccl.so: cannot open')", r"does not import: libhccl\.so.*set_env\.sh"),
        ("import no_such_module_7", "does not import: .*Fix: pip install no_such_module_7"),
    ],
)
def test_a_torch_npu_that_does_not_import_says_why_and_what_helps(
    install: Callable[[dict[str, str]], None], breaks: str, says: str
) -> None:
    install({"__init__.py": breaks})
    with pytest.raises(BackendError, match=says):
        _versions.load()


def test_a_torch_npu_that_sees_no_npu_says_where_to_look(install: Callable[[dict[str, str]], None]) -> None:
    install(
        {
            "__init__.py": "__version__ = '9'\nfrom torch_npu import npu",
            "npu/__init__.py": "mstx = None\ndef is_available():\n    return False",
            "profiler/__init__.py": "",
            "profiler/profiler_interface.py": "",
        }
    )
    with pytest.raises(BackendError, match="npu-smi"):
        _versions.load()
