"""Parts of `stepscope.integrations` without the framework that they stand in."""

from __future__ import annotations

import sys

import pytest

MODULES = {
    "hydra": ["hydra", "hydra.core", "hydra.core.config_store"],
    "transformers": ["transformers"],
    "lightning": ["lightning", "lightning.pytorch", "pytorch_lightning"],
}
"""Modules of the frameworks that each part imports."""


@pytest.mark.parametrize("name", MODULES)
def test_a_framework_that_is_not_installed_is_named_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in MODULES[name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"stepscope.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"needs {name}. Fix: pip install {name}"):
        __import__(f"stepscope.integrations.{name}")
