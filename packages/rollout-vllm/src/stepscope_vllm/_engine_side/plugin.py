"""Plugin in vLLM's own processes, so that captures of a pipeline can follow each other at once.

vLLM calls the entry points `vllm.general_plugins` of what is installed beside it, in each of its processes. A
stage of a pipeline sends what the next one needs and goes on; it waits for that send in its next pass. Over
gloo (what is said of the tensors, from vLLM 0.29 on; on CPUs the tensors too) torch ends the send's scope
there, in a recording that may be freed by then. So no recording has these sends; see
`stepscope.backends.torch.record_function_scopes`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from stepscope import switch
from stepscope.backends.torch.record_function_scopes import is_unrecorded, unrecorded

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
    f"{_ENDS}. It does not where stepscope-rollout-vllm is installed in the server's environment (vLLM loads "
    "its plugin; `stepscope` must stand in VLLM_PLUGINS where that is set). Where it is not, have the server "
    "answer a request between two captures"
)


def load() -> None:
    """Called by vLLM, in all of its processes, and by our worker extension. More than once does no harm."""
    if switch.DISABLED:
        return
    with suppress(Exception):  # of a version that has it elsewhere: vLLM would not start
        hide_sends()


def hide_sends() -> None:
    """Leave the sends of pipeline stages out of recordings. Imports only modules that vLLM imports anyway."""
    group, name = _sending()
    send = getattr(group, name, None)
    if send is not None:
        setattr(group, name, unrecorded(send))


def is_missing() -> bool:
    """Return whether a pipeline of this process's vLLM leaves sends open, and nothing hides them."""
    if _STATE not in sys.modules:
        return False
    group, name = _sending()
    send = getattr(group, name, None)
    return send is not None and not is_unrecorded(send)


def _sending() -> tuple[Any, str]:
    """Return the class, None where this version has it elsewhere, and its method that sends over gloo and
    does not wait.
    """
    from vllm.platforms import current_platform

    group = getattr(import_module(_STATE), "GroupCoordinator", None)
    return group, "isend_tensor_dict" if current_platform.is_cpu() else "isend_object"
