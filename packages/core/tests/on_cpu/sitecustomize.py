"""Stand-ins on a CPU for the GPU that frameworks expect. No file of a framework or an engine is edited.

Python runs this first in every process whose PYTHONPATH has this folder: Ray's workers and engines too. The
variable `ON_CPU` names the framework. Each patch names the place that needs it.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable
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
"""Modules of OpenRLHF's ring_attn_utils.py and SkyRL's model_wrapper.py. Only packed samples call them."""


def prepare(framework: str) -> None:
    """Replace each function once its module is imported."""
    for module, patch in {"vllm.model_executor.layers.utils": keep_weights, **PATCHES[framework]}.items():
        wrapt.register_post_import_hook(patch, module)
    if framework in WITHOUT_FLASH_ATTENTION:
        for name, members in FLASH_ATTENTION.items():
            sys.modules[name] = absent(name, *members)
    if framework == "skyrl" and sys.version_info < (3, 12):
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses that of an older Python


def absent(name: str, *members: str) -> ModuleType:
    """Return a package in the place of one that is not installed, whose members nothing calls."""
    package: Any = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__path__ = []
    for member in members:
        setattr(package, member, None)
    return package  # type: ignore[no-any-return]  # Any above: a module takes any attribute


def cuda_is_the_cpu(torch: Any) -> None:
    """Let `tensor.to(torch.cuda.current_device())` stay where it is, and have nothing to wait for."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def one_cuda_which_is_the_cpu(torch: Any) -> None:
    """Count one device too, whose tensors are the CPU's."""
    cuda_is_the_cpu(torch)
    torch.cuda.device_count = lambda: 1
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self


def mesh_of_the_cpu(module: Any) -> None:
    """Make the mesh of the CPU, where OpenRLHF's `setup_distributed` and SkyRL's worker.py ask for "cuda"."""
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


def weights_over_gloo(module: Any) -> None:
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


def groups_of_gloo(module: Any) -> None:
    """Start groups of gloo, where SkyRL's worker.py asks for "cpu:gloo,cuda:nccl"."""
    theirs = module.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return theirs("gloo", *args, **kwargs)

    module.init_process_group = init_process_group


def keep_weights(module: Any) -> None:
    """Keep the original weights, into which updates are loaded: vLLM packs them and drops these."""
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


def rotate_without_kernels(_: Any) -> None:
    """Let SGLang's rotary embedding import a kernel of vLLM, which it does not call: torch rotates."""
    for name, members in {"vllm": (), "vllm._custom_ops": ("rotary_embedding",)}.items():
        sys.modules.setdefault(name, absent(name, *members))


def serve_on_the_cpu(module: Any) -> None:
    """Serve with SGLang on the CPU, without graphs of CUDA: AReaL and a part of verl say no device.

    An idle scheduler sleeps, since the cores are few, and the cache is small, since others need memory too.
    """
    theirs = module.ServerArgs.__post_init__

    def prepare(arguments: Any) -> None:
        arguments.device, arguments.grammar_backend = "cpu", "none"
        arguments.disable_piecewise_cuda_graph = arguments.sleep_on_idle = True
        arguments.mem_fraction_static, arguments.max_total_tokens = 0.5, 4096
        theirs(arguments)

    module.ServerArgs.__post_init__ = prepare


def visible_devices(module: Any) -> None:
    """Name a variable of devices, which AReaL's launcher sets before each command."""
    module.CpuPlatform.device_control_env_var = "CUDA_VISIBLE_DEVICES"


def share_memory_of_the_cpu(module: Any) -> None:
    """Send weights as torch shares memory: SGLang reads which device a tensor is on from CUDA's handle."""
    import torch.multiprocessing

    sharing: Any = torch.multiprocessing
    module.monkey_patch_torch_reductions = lambda: None
    sharing.set_sharing_strategy("file_system")  # between processes without a common parent


def without_disaggregation(module: Any) -> None:
    """Give the router's arguments a field that SkyRL's vllm_router.py reads and the released router lacks."""
    module.RouterArgs.pd_disaggregation = False


SGLANG: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.rotary_embedding.base": rotate_without_kernels,
    "sglang.srt.server_args": serve_on_the_cpu,
}
PATCHES: dict[str, dict[str, Callable[[Any], None]]] = {
    "openrlhf": {
        "torch": cuda_is_the_cpu,
        "openrlhf.utils.deepspeed.deepspeed": mesh_of_the_cpu,
        "openrlhf.trainer.ppo_utils.replay_buffer": buffer_of_the_cpu,
        "openrlhf.utils.distributed_util": weights_over_gloo,
        "openrlhf.trainer.ray.vllm_worker_wrap": receive_on_the_cpu,
    },
    "skyrl": {
        "torch": one_cuda_which_is_the_cpu,
        "torch.distributed.distributed_c10d": groups_of_gloo,
        "torch.distributed.device_mesh": mesh_of_the_cpu,
        "vllm_router.router_args": without_disaggregation,
    },
    "verl": {**SGLANG, "sglang.srt.utils.patch_torch": share_memory_of_the_cpu},
    "areal": {**SGLANG, "areal.infra.platforms.cpu": visible_devices},
}
"""{framework: {module: what is replaced in it}}"""
WITHOUT_FLASH_ATTENTION = {"openrlhf", "skyrl"}


if __name__ == "sitecustomize":
    prepare(os.environ["ON_CPU"])
