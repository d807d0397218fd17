"""Stand-ins on a CPU for the GPU that OpenRLHF 0.11.2 expects. No file of it, DeepSpeed or vLLM is edited.

Python runs this first in every process whose PYTHONPATH has this folder: Ray's workers and vLLM's engine too.
Each patch names the place that needs it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

FLASH_ATTENTION = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}
"""Modules that models/ring_attn_utils.py imports. Only packed samples and ring attention call them."""


def prepare() -> None:
    """Replace each function once its module is imported."""
    for name, members in FLASH_ATTENTION.items():
        absent: Any = ModuleType(name)
        absent.__spec__ = ModuleSpec(name, None, is_package=True)
        absent.__path__ = []
        for member in members:
            setattr(absent, member, None)
        sys.modules[name] = absent
    for module, patch in {
        "torch": cuda_is_the_cpu,
        "openrlhf.utils.deepspeed.deepspeed": mesh_of_the_cpu,
        "openrlhf.trainer.ppo_utils.replay_buffer": buffer_of_the_cpu,
        "openrlhf.utils.distributed_util": gloo_for_nccl,
        "openrlhf.trainer.ray.vllm_worker_wrap": receive_on_the_cpu,
        "vllm.model_executor.layers.utils": keep_weights,
    }.items():
        wrapt.register_post_import_hook(patch, module)


def cuda_is_the_cpu(torch: Any) -> None:
    """Let `tensor.to(torch.cuda.current_device())` stay where it is, and have nothing to wait for."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def mesh_of_the_cpu(module: Any) -> None:
    """Make the mesh of the CPU, where `setup_distributed` asks for one of "cuda"."""
    theirs = module.init_device_mesh
    module.init_device_mesh = lambda _, *args, **kwargs: theirs("cpu", *args, **kwargs)


def buffer_of_the_cpu(module: Any) -> None:
    """Read "cuda:<current device>" as the CPU, in this module alone."""
    import torch

    here: Any = ModuleType("torch")
    vars(here).update(vars(torch))
    here.device = lambda _: torch.device("cpu")
    module.torch = here


class Broadcast:
    """A group of gloo beside the default one, in the place of vLLM's PyNcclCommunicator."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        import torch.distributed

        self._dist: Any = torch.distributed
        store = self._dist.TCPStore(address, port, world_size, rank == 0)
        self.group = self._dist.ProcessGroupGloo(store, rank, world_size)

    def broadcast(self, tensor: Any, src: int, stream: object = None) -> None:
        options = self._dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


def gloo_for_nccl(module: Any) -> None:
    """Send the weights over gloo: `stateless_init_process_group` knows NCCL alone."""
    module.stateless_init_process_group = lambda address, port, rank, world_size, _: Broadcast(
        address, port, rank, world_size
    )


def receive_on_the_cpu(_: Any) -> None:
    """Make the tensor for received weights on the CPU, where `WorkerWrap.update_weight` names "cuda"."""
    import torch

    theirs = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return theirs(*args, **kwargs)

    torch.empty = empty


def keep_weights(module: Any) -> None:
    """Keep the original weights, into which updates are loaded: vLLM packs them and drops these."""
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


if __name__ == "sitecustomize":
    prepare()
