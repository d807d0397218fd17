"""Tests of the plugin in SGLang's processes with a stand-in for SGLang's hooks; `real/` has the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from stepscope.backends.torch import record_function_scopes
from stepscope.engines import pass_socket
from stepscope_sglang._engine_side import plugin
from stepscope_sglang._engine_side.states import SENDS_QUIET

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., object]]:
    """Return {name in the scheduler's module: hook} for the hooks that `load` registers."""
    from torch.distributed import ProcessGroup

    hooks_set: dict[str, Callable[..., object]] = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(registry).update(
        HookRegistry=SimpleNamespace(
            register=lambda target, hook, kind: hooks_set.update({target.rpartition("scheduler.")[2]: hook})
        ),
        HookType=SimpleNamespace(BEFORE="before", AFTER="after"),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.managers", plugin._SCHEDULER):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(record_function_scopes, "watch", lambda: None)
    monkeypatch.setattr(ProcessGroup, "send", ProcessGroup.send)  # restored after the test
    monkeypatch.setattr(plugin, "_quiet", False)
    monkeypatch.setattr(pass_socket, "listen", lambda answers: None)  # its thread would outlive the test
    plugin.load()
    return hooks_set


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    plugin._of_this_process.cache_clear()


def quiet(hooks: dict[str, Callable[..., object]]) -> bool:
    """Return whether a scheduler reports that its sends are unrecorded. Assert that the report is true."""
    from torch.distributed import ProcessGroup

    answer = SimpleNamespace(internal_state={})
    hooks["Scheduler.get_internal_state"](answer, SimpleNamespace(forward_ct=3))
    is_quiet = answer.internal_state[SENDS_QUIET]
    assert is_quiet is record_function_scopes.is_unrecorded(ProcessGroup.send)
    return is_quiet


def test_sends_are_hidden_where_a_scheduler_is_made(hooks: dict[str, Callable[..., object]]) -> None:
    hooks["Scheduler.__init__"](object(), "server_args")
    assert quiet(hooks)


def test_sends_of_the_process_that_makes_the_engine_stay_in_its_recordings(
    hooks: dict[str, Callable[..., object]],
) -> None:
    assert not quiet(hooks)
