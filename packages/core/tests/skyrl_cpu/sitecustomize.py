"""Stand-ins on a CPU for the GPU and the Python 3.12 that SkyRL 0.4.0 expects. None of its files is edited.

Python runs this first in every process whose PYTHONPATH has this folder: Ray's workers and vLLM's engine too.
Each patch names the place that needs it.
"""

from __future__ import annotations

import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import typing_extensions
import wrapt

FLASH_ATTENTION = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("pad_input", "unpad_input"),
}
"""Modules that workers/model_wrapper.py imports. Only `trainer.flash_attn` calls them."""


def prepare() -> None:
    """Replace each function once its module is imported."""
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses that of an older Python
    for name, members in FLASH_ATTENTION.items():
        absent: Any = ModuleType(name)
        absent.__spec__ = ModuleSpec(name, None, is_package=True)
        absent.__path__ = []
        for member in members:
            setattr(absent, member, None)
        sys.modules[name] = absent
    for module, patch in {
        "torch": cuda_is_the_cpu,
        "torch.distributed.distributed_c10d": gloo_for_nccl,
        "torch.distributed.device_mesh": mesh_of_the_cpu,
        "vllm.model_executor.layers.utils": keep_weights,
        "vllm_router.router_args": without_disaggregation,
    }.items():
        wrapt.register_post_import_hook(patch, module)


def cuda_is_the_cpu(torch: Any) -> None:
    """Let `tensor.to(torch.cuda.current_device())` stay where it is, and have nothing to wait for."""
    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self


def gloo_for_nccl(module: Any) -> None:
    """Start groups of gloo, where worker.py asks for "cpu:gloo,cuda:nccl"."""
    theirs = module.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return theirs("gloo", *args, **kwargs)

    module.init_process_group = init_process_group


def mesh_of_the_cpu(module: Any) -> None:
    """Make the mesh of the CPU, where worker.py and fsdp_utils.py ask for one of "cuda"."""
    theirs = module.init_device_mesh
    module.init_device_mesh = lambda _, *args, **kwargs: theirs("cpu", *args, **kwargs)


def keep_weights(module: Any) -> None:
    """Keep the original weights, into which updates are loaded: vLLM packs them and drops these."""
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


def without_disaggregation(module: Any) -> None:
    """Give the router's arguments a field that vllm_router.py reads and the released router lacks."""
    module.RouterArgs.pd_disaggregation = False


if __name__ == "sitecustomize":
    prepare()
