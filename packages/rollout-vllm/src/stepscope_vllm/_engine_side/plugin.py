"""Plugin in vLLM's own processes. It allows notes of forward passes, and hides some sends from the profiler.

vLLM calls the entry points `vllm.general_plugins` of all installed packages, in each of its processes.

The plugin hides sends because of a crash. A pipeline stage starts a send to the next stage, and waits for the
send in its next pass. If the send uses gloo, torch ends the send's scope only in that next pass, in a
recording that may be freed already. From vLLM 0.29 on, gloo sends the metadata of tensors; on CPUs, gloo also
sends the tensors. So sends over gloo are left out of all recordings; see
`stepscope.backends.torch.record_function_scopes`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from stepscope.backends.torch.record_function_scopes import is_unrecorded, unrecorded
from stepscope.files import switch
from stepscope_vllm._engine_side import passes

_STATE = "vllm.distributed.parallel_state"
_ENDS = (
    "between the stages of a pipeline vLLM leaves sends open when a recording stops; where their end falls "
    "into the next recording, torch ends the worker with a segmentation fault"
)
MISSING = (
    f"{_ENDS}. Fix: build the engine with **stepscope_vllm.engine_args(config, replica), or have vLLM load "
    "our plugin: stepscope-rollout-vllm installed beside it, `stepscope` in VLLM_PLUGINS where that is set"
)
OF_A_SERVER = (
    f"{_ENDS}. Fix: install stepscope-rollout-vllm in the server's environment (with `stepscope` in "
    "VLLM_PLUGINS, if that is set), or send a request between two captures"
)


def is_chosen() -> bool:
    """Return whether vLLM loads this plugin in its processes. VLLM_PLUGINS can exclude the plugin."""
    chosen = os.environ.get("VLLM_PLUGINS")
    return not switch.DISABLED and (chosen is None or "stepscope" in chosen.split(","))


def load() -> None:
    """Hide sends from recordings, and prepare notes of passes, unless stepscope is switched off.

    vLLM calls this function in all of its processes. A second call, by the worker extension, has no effect.
    """
    if switch.DISABLED:
        return
    with suppress(Exception):  # another version may lack the module; an error would keep vLLM from starting
        hide_sends()
    with suppress(Exception):
        import wrapt

        wrapt.register_post_import_hook(passes.install, "vllm.v1.engine.core")


def hide_sends() -> None:
    """Leave the sends of pipeline stages out of recordings.

    This function imports only modules that vLLM imports anyway.
    """
    group, name = _sending()
    send = getattr(group, name, None)
    if send is not None:
        setattr(group, name, unrecorded(send))


def is_missing() -> bool:
    """Return True if recordings contain the sends of this process' pipeline stages, because the plugin was
    not loaded.
    """
    if _STATE not in sys.modules:
        return False
    group, name = _sending()
    send = getattr(group, name, None)
    return send is not None and not is_unrecorded(send)


def _sending() -> tuple[Any, str]:
    """Return the class that sends, and the name of its method that sends over gloo and does not wait.

    The class is None if the module `_STATE` of this version of vLLM does not have it.
    """
    from vllm.platforms import current_platform

    group = getattr(import_module(_STATE), "GroupCoordinator", None)
    return group, "isend_tensor_dict" if current_platform.is_cpu() else "isend_object"
